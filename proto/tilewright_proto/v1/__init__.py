"""Generated stubs of `tilewright.v1`."""

"""Generated stubs of `inference`."""

"""Generated protocol stubs of Tilewright; the sources are `proto/tilewright/v1/*.proto`."""

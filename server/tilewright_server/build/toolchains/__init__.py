"""Compilers of each kind of device: found, identified and called."""

"""Kernel sets of convolution: defaults, original tables, generator."""

"""Workspace of convolution kernels."""

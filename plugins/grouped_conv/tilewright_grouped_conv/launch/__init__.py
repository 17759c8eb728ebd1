"""Launches of convolution kernels: argument structs, grids, groups of channels."""

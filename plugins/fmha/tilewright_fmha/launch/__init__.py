"""Launches of attention kernels: argument structs, grids, splits, tensor maps."""

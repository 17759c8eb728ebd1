"""Launches of GEMM kernels: argument structs, grids, tensor maps."""

"""Kernel sets of GEMM: defaults, preselected, sweeps."""

"""Execution plans of GEMM and of packing B."""

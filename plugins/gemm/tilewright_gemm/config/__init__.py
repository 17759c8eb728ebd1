"""Kernel configurations of GEMM and the formats of pre-packed B."""

"""Candidate kernels for a problem of GEMM, by kind of device."""

"""Analytic cost models of GEMM, by kind of device."""

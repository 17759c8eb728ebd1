"""Measurement of kernels in a process that holds the device: operands, checks, timing."""

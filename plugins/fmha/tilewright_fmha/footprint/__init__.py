"""Shared memory, registers and workspace of attention kernels."""

"""Kernels of all operations: listed, built, loaded once for each device."""

"""Declared sets of kernels, and registries of them."""

"""Workbench of Hopper kernels: each alone, without the server; checked, timed and compared between sets of headers."""

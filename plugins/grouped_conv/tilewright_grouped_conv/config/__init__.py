"""Kernel configurations of convolution, their choices and defaults."""

"""Candidate kernels for a problem of convolution, by kind of device."""

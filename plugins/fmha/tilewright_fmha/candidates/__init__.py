"""Candidate kernels for a problem of attention, by kind of device."""

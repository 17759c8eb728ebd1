"""Analytic cost models of convolution, by kind of device."""

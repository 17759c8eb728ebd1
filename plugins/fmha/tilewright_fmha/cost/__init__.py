"""Analytic cost models of attention, by kind of device."""

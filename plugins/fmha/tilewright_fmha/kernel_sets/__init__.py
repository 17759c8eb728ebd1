"""Kernel sets of attention: defaults, receipts, generator."""

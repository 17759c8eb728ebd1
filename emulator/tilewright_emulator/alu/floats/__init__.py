"""Semantics of floating-point instructions and conversions."""

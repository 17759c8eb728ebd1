"""Semantics of the vector and scalar units."""

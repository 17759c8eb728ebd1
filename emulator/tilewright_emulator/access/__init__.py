"""Semantics of memory instructions."""

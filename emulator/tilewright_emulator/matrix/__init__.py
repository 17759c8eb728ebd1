"""Semantics of matrix instructions."""

"""Semantics of integer instructions."""

"""Launches: control flow, scheduling of waves, set-up by the command processor."""

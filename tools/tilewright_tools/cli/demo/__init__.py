"""The demonstration: every operation once, checked and timed."""

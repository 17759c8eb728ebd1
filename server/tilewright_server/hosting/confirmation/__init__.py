"""Confirmation of choices: kernels of busy problems are timed beside live work, and the fastest is taken."""

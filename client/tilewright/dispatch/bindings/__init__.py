"""Bindings: a plan with its memory, looked up once, and the short ways of a call that was made before."""

"""Kernel configurations: their names and keys, and the rules that say which are valid."""

"""Kernel configurations of attention, their choices and defaults."""

"""Processes that compile: helpers around compiler libraries, limits, and their loop."""

"""Drivers of GPUs that the process of the caller has loaded."""

"""The contract of an operation: problems, plans, arguments, devices, sources."""

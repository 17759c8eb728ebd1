"""Loading of plugins: hooks, the check of an operation, the loader."""

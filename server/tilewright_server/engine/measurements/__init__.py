"""The performance database: what was measured on this machine, kept across runs and carried between machines."""

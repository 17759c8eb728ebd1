"""Products computed in tiles, whatever the operation: what they need of an arch, and which of them it can run."""

"""The blocking client, its plans, launches and caches."""

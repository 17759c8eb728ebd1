"""The artifact cache on disk: entries, locks, maintenance."""

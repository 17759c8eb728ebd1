"""State of one client: session, shared memory, settings."""

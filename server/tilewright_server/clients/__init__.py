"""Identities of callers, and the queue that gives them turns by what they have used."""

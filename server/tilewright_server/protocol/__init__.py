"""Packets, errors and socket paths that every transport of the server shares."""

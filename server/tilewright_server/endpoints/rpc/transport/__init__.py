"""Calls of gRPC on their way: events, intake, threads that serve them, status, books."""

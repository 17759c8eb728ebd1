"""Servicers of the protocol's services: convert, call the core, convert."""

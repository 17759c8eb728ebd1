"""Devices that the server can open, one package for each kind."""

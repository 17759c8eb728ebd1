"""Launching in this process: the library, and plans that it has opened."""

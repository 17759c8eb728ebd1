"""Imported before every test module."""

# Before anything imports gRPC: the client asks it to survive forks, which tests of forked children need.
import tilewright  # noqa: F401

"""Conversions between protobuf messages and the core's own types."""

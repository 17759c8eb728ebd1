"""Requests of attention read part by part."""

"""Pipelines: one record for each template, and what all of them make together."""

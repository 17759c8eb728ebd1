"""Pipelines of attention: one record for each template, and all that is put together from the records."""

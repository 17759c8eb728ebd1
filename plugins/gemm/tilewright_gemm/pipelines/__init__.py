"""Pipelines of GEMM: one record for each template, and all that is put together from the records."""

"""Parts of analytic cost models."""

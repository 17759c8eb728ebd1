"""The HTTP listener of metrics and probes, and its pages."""

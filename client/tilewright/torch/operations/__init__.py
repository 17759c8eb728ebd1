"""Custom operations in the namespace ``tilewright``."""

"""Declarations of the operations: attributes, operands, examples."""

"""Operands of executions: bound to the memory that they name, staged, or kept bound."""

"""The operations by name: arguments of the generic calls."""

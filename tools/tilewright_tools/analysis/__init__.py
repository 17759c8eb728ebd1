"""What can be told of a compiled kernel without running it."""

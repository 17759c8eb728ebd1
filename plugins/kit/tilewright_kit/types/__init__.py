"""Element types, tensors, the shared vocabulary and the errors of operations."""

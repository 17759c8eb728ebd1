"""The strided copy that plans make where no kernel takes a tensor as it lies."""

"""Float64 references of elementwise steps, and comparisons with stated bounds."""

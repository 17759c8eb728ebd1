"""Commands about kernels: list, validate, build, generate, analyze."""

"""Code objects: the file, its instructions, its kernels."""

"""The CUDA driver: its functions as a device needs them, its errors and loaded modules."""

"""NVIDIA's Multi-Process Service: its daemon, and the process that ends a daemon of ours."""

"""The CPU as a device: a persistent pool of threads, huge-page memory, kernels as shared objects."""

"""Memory of a GPU: pools, handles of other processes, deferred frees."""

"""Attention, its gradients, and caches of keys and values."""

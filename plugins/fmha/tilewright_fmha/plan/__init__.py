"""Execution plans of attention, its gradients and caches."""

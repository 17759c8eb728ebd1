"""Execution plans of convolution and its gradients."""

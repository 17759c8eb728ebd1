"""From a request to a prepared plan: kernels chosen, built, loaded and remembered."""

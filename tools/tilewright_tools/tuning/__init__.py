"""The tile engine: builds, checks and times many kernels on many problems, on any device.

``sweep`` runs in the caller's process and decides what is done; ``worker`` is the process that holds the device, so
that a kernel that crashes or hangs costs that process alone.
"""

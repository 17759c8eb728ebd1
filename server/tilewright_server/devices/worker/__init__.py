"""Devices in a process of their own, so that a kernel's fault ends that process and not the server."""

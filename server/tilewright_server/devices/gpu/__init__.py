"""Common parts of GPUs of all vendors: everything but the calls of the driver.

``api.GpuApi`` names the calls that are made, ``driver.GpuDriver`` what else a kind of GPU brings. ``devices/cuda`` and
``devices/hip`` implement both.
"""

"""NVIDIA GPUs as devices. Importing this touches no driver, and needs no package of NVIDIA's.

``cuda.bindings.driver`` is used directly. The device needs what ``cuda.core`` keeps to itself (result codes, handles as
numbers, descriptors written in place), and a launch may cost a few microseconds only.
"""

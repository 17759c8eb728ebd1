"""Fused multi-head attention: forward, backward and the key-value cache, in the rooms that every operation has.

The entry point is ``tilewright_fmha.plugin``.
"""

__version__ = "0.1.0"

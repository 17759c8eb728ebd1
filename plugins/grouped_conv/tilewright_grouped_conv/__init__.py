"""Grouped convolution: forward and both gradients, in the rooms that every operation has.

The entry point is ``tilewright_grouped_conv.plugin``.
"""

__version__ = "0.1.0"

"""Grouped convolution: forward and both gradients, in the rooms that every operation has.

The entry point is ``tilewright_grouped_conv.plugin``.
"""

__version__ = "0.1.0"
TILEWRIGHT_OPERATIONS = {
    "conv": "grouped_conv_fwd",
    "conv_backward_data": "grouped_conv_bwd_data",
    "conv_backward_weight": "grouped_conv_bwd_weight",
    "conv_transform": "conv_transform",
}
"""Operations, and the first words of their kernels' names: known before the plugin is imported."""

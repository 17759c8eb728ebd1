"""Fused multi-head attention: forward, backward and the key-value cache, in the rooms that every operation has.

The entry point is ``tilewright_fmha.plugin``.
"""

__version__ = "0.1.0"
TILEWRIGHT_OPERATIONS = {
    "attention": "fmha",
    "attention_backward": "fmha_grad",
    "kv_append": "fmha_cache",
}
"""Operations, and the first words of their kernels' names: known before the plugin is imported."""

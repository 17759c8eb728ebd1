"""GEMM: C = epilogue(alpha * A x B), in the rooms that every operation has.

The entry point is ``tilewright_gemm.plugin``.
"""

__version__ = "0.1.0"
TILEWRIGHT_OPERATIONS = {"gemm": "gemm", "gemm_pack_b": "gemm_pack_b"}
"""Operations, and the first words of their kernels' names: known before the plugin is imported."""

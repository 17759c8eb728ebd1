"""GEMM: C = epilogue(alpha * A x B), in the rooms that every operation has.

The entry point is ``tilewright_gemm.plugin``.
"""

__version__ = "0.1.0"

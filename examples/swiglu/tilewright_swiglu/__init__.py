"""The feed-forward block of transformers as one operation: ``(silu(x w_gate) * (x w_up)) w_down``.

It has no kernel of its own: three products of GEMM, fused by their epilogues, with what lies between them in the
workspace.
"""

__version__ = "0.1.0"

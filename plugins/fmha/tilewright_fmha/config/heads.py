"""Sizes of heads that kernels hold: those that an arch lists, and on CPUs larger ones in steps."""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_kit.types.arithmetic import padded

__all__ = ["CPU_MOST_HDIM", "GPU_MOST_HDIM", "held_hdim", "most_hdim"]

CPU_MOST_HDIM, GPU_MOST_HDIM = 1024, 256
"""Elements of a head, at most: a CPU's blocks lie in its caches, a GPU's in registers and shared memory."""
_STEP = 64
"""Heads above ``GPU_MOST_HDIM`` are held in multiples of so many elements."""


def most_hdim(arch: ArchSpec) -> int:
    return CPU_MOST_HDIM if arch.kind == "cpu" else GPU_MOST_HDIM


def held_hdim(arch: ArchSpec, dtype: str, q: int, v: int, columns: int = 1) -> tuple[int, int] | None:
    """The smallest sizes of heads of kernels that hold ``q`` and ``v``, the latter a multiple of ``columns``; None if
    the arch has none.
    """
    spec = attention_of(arch)
    if spec is None:
        return None
    if max(q, v) <= GPU_MOST_HDIM or arch.kind != "cpu":
        return spec.hdim_for(dtype, q, v, columns)
    if dtype not in spec.hdims or max(q, v) > CPU_MOST_HDIM:
        return None
    # Either size is held as if the other were the same.
    held = (
        padded(size, _STEP) if size > GPU_MOST_HDIM else spec.hdim_for(dtype, size, size, columns) for size in (q, v)
    )
    first, second = (size if isinstance(size, int) else size[index] if size else 0 for index, size in enumerate(held))
    return first, second

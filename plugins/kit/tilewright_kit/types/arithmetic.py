"""Integer arithmetic of sizes and tiles."""

from __future__ import annotations

__all__ = ["ceil_div", "padded"]


def ceil_div(size: int, step: int) -> int:
    """``ceil(size / step)`` in integers."""
    return -(-size // step)


def padded(size: int, step: int) -> int:
    """``size`` rounded up to a multiple of ``step``."""
    return ceil_div(size, step) * step

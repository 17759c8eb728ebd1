"""Division by a constant as a multiplication and a shift: ``tw_divisor`` of ``tilewright/core/args/conv.h``."""

from __future__ import annotations

from tilewright_kit.contract.plan import I64, Struct

__all__ = ["LARGEST", "divisor", "divisor_row"]

LARGEST = 2**31
"""Dividends and divisors are smaller."""


def divisor(d: int) -> tuple[int, int]:
    """``(multiplier, shift)`` with ``n // d == (n * multiplier) >> shift`` for all ``0 <= n < 2**31``.

    With ``shift = 31 + ceil(log2 d)`` and the multiplier rounded up, the error of the quotient is below ``1 / d``
    (Granlund and Montgomery, 1994). The multiplier has at most 32 bits, so the product fits 63. Raises ``ValueError``
    unless ``1 <= d < 2**31``.
    """
    if not 1 <= d < LARGEST:
        raise ValueError(f"there is no divisor of {d}")
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift


def divisor_row(d: int) -> Struct:
    """The struct; of what is beyond 31 bits, or nothing to divide by, zeros (the planner then takes another kernel)."""
    multiplier, shift = divisor(d) if 1 <= d < LARGEST else (0, 0)
    return Struct((I64(multiplier), I64(shift)))

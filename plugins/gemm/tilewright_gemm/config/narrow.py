"""The contract of operands of fewer than 8 bits: how values of fp4, fp6 and bf6 are stored.

| format | bits | sign, exponent, mantissa | largest value |
|---|---|---|---|
| fp4 | 4 | E2M1 | 6 |
| fp6 | 6 | E2M3 | 7.5 |
| bf6 | 6 | E3M2 | 28 |

They are the element types of the MX formats of the Open Compute Project, without infinities and NaNs. Values lie along
k without gaps, the first one in the lowest bits of the first byte: two of fp4 a byte, four of 6 bits in three. ``a`` is
[.., M, ceil(K bits / 8)] of bytes (``int8``) whose rows are contiguous, ``b`` [.., ceil(K bits / 8), N] of contiguous
columns: the transposed view of [N, ceil(K bits / 8)]. Bits that are left of a last byte are zero. An fp8 or bf8 operand
beside one of them lies along k, too; if there is none, K is as many values as the shorter operand's bytes hold.

Blocks of 32 have exponents (``block_scales``, 1x32_1x32). All values are values of fp8 (E4M3): kernels whose
instructions do not take a format multiply it as fp8, or as fp32, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright_gemm.vocabulary import ScaleA, ScaleB
from tilewright_kit.types.arithmetic import ceil_div

__all__ = ["NARROW", "Narrow", "narrow_a", "narrow_b", "widths"]

_BITS = 8


@dataclass(frozen=True, slots=True)
class Narrow:
    """A format. Its name is the word of requests, and the type's in C++."""

    name: str
    bits: int
    numpy: str
    """The type of ``ml_dtypes`` that has its values, one a byte."""
    scale_a: ScaleA
    """Values of ``scale_a`` and ``scale_b`` that name the type in a kernel's signature."""
    scale_b: ScaleB

    def bytes_of(self, k: int) -> int:
        """Bytes of a line of ``k`` values."""
        return ceil_div(k * self.bits, _BITS)

    def held_in(self, nbytes: int) -> int:
        """Values that so many bytes hold."""
        return nbytes * _BITS // self.bits


NARROW: dict[str, Narrow] = {
    item.name: item
    for item in (
        Narrow("fp4", 4, "float4_e2m1fn", ScaleA.FP4_1X32, ScaleB.FP4_1X32),
        Narrow("fp6", 6, "float6_e2m3fn", ScaleA.FP6_1X32, ScaleB.FP6_1X32),
        Narrow("bf6", 6, "float6_e3m2fn", ScaleA.BF6_1X32, ScaleB.BF6_1X32),
    )
}
_OF_A = {item.scale_a: item for item in NARROW.values()}
_OF_B = {item.scale_b: item for item in NARROW.values()}


def narrow_a(scale_a: ScaleA) -> Narrow | None:
    """The format of an A with such scales; None if it is stored as its type says."""
    return _OF_A.get(scale_a)


def narrow_b(scale_b: ScaleB) -> Narrow | None:
    """The format of B, likewise."""
    return _OF_B.get(scale_b)


def widths(scale_a: ScaleA, scale_b: ScaleB) -> tuple[int, int]:
    """Bits of a value of A and of B, where the others are 8-bit floats."""
    a, b = narrow_a(scale_a), narrow_b(scale_b)
    return a.bits if a else _BITS, b.bits if b else _BITS

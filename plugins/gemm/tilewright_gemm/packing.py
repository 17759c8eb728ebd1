"""The format of a B that was packed ahead of time (pre-shuffled weights).

``bpanel-{element}-nr{NR}-vk{VK}``: the K x N matrix lies as ``[ceil(N/NR)][ceil(K/VK)][NR]`` groups of 32 bits, each
with VK consecutive values of k, zero-filled at the edges. ``element`` is what the kernel multiplies, not always what B
was given in (fp16 becomes fp32 on a CPU). Panels of int8 in groups of four are followed by one int32 per column, which
undoes the offset that makes A unsigned. Sizes are those of ``packed_bytes`` in ``tilewright/cpu/pack.hpp``; a test
compares the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tilewright_gemm.attributes import refuse
from tilewright_kit.dtypes import DType

__all__ = ["UNDECIDED", "PackedFormat", "format_of"]

UNDECIDED = "bpanel"
"""The packing of an output whose format the planner has yet to choose."""

GROUP_BYTES = 4
_ALIGNMENT = 64
_FORMAT = re.compile(r"bpanel-(fp32|bf16|int32|int16|int8)-nr([1-9][0-9]{0,3})-vk([1-9][0-9]{0,2})")


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Element type and panel shape. Two kernels can share a packed B exactly if their formats are equal."""

    element: str
    nr: int
    vk: int

    def __str__(self) -> str:
        return f"{UNDECIDED}-{self.element}-nr{self.nr}-vk{self.vk}"

    @classmethod
    def parse(cls, text: str, field: str) -> PackedFormat:
        """The inverse of ``str``. Raises ``InvalidArgumentError`` naming ``field``."""
        match = _FORMAT.fullmatch(text)
        if match is None:
            raise refuse(
                f"{field} is in packed format {text!r}, which is not one of GEMM's",
                f"{field}.packing",
                text,
                "packing_format",
                "pack B with the operation gemm_pack_b",
            )
        return cls(match[1], int(match[2]), int(match[3]))

    @property
    def has_sums(self) -> bool:
        return self.element == "int8"

    def nbytes(self, k: int, n: int) -> int:
        """Bytes that a packed K x N matrix fills."""
        return packed_bytes(n, k, self.nr, self.vk, self.has_sums)


def packed_bytes(extent: int, k: int, rows: int, depth: int, with_sums: bool) -> int:
    """Size of a packed operand of ``extent`` rows (A) or columns (B): the formula of ``tilewright/cpu/pack.hpp``."""
    groups = -(-k // depth) + with_sums
    nbytes = -(-extent // rows) * rows * GROUP_BYTES * groups
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def format_of(dtype_a: DType, warp_tile: tuple[int, int, int]) -> PackedFormat:
    """The packed format that a CPU kernel of this warp tile reads."""
    _, nr, vk = warp_tile
    if dtype_a == DType.INT8:
        element = {1: "int32", 2: "int16"}.get(vk, "int8")
    else:
        element = "fp32" if vk == 1 else "bf16"
    return PackedFormat(element, nr, vk)

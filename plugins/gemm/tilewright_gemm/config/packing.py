"""The formats of a B that was packed ahead of time (pre-shuffled weights).

CPUs: ``bpanel-{element}-nr{NR}-vk{VK}``: the K x N matrix lies as ``[ceil(N/NR)][ceil(K/VK)][NR]`` groups of 32 bits,
each with VK consecutive values of k, zero-filled at the edges. ``element`` is what the kernel multiplies, not always
what B was given in (fp16 becomes fp32 on a CPU). Panels of int8 in groups of four are followed by one int32 per column,
which undoes the offset that makes A unsigned. Sizes are those of ``packed_bytes`` in
``tilewright/cpu/blocks/pack.hpp``; a test compares the two.

AMD GPUs: ``bvector-{element}-n{N}``: panels of N columns, each of them vectors of 16 bytes of consecutive values of k,
``[ceil(columns/N)][K/values][N][values]`` with K filled up with zeros to 128 bytes: ``tilewright/gpu/amd/packed.hpp``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.tiles.footprint.cpu import packed_bytes
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError

__all__ = ["UNDECIDED", "PackedFormat", "Packing", "VectorFormat", "format_of", "packing_of", "parse_packing"]

UNDECIDED = "bpanel"
"""The packing of an output whose format the planner has yet to choose."""

_BUFFER_BYTES = 2**31
"""Bytes that a buffer of an AMD GPU counts in a signed number: ``PackedOperand`` of ``gpu/amd/packed.hpp``."""
_VECTOR_BYTES, _DEPTH_BYTES = 16, 128
_VECTORS = re.compile(r"bvector-(fp32|fp16|bf16|fp8|bf8|int8)-n([1-9][0-9]{0,2})")
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
            raise _unknown(text, field)
        return cls(match[1], int(match[2]), int(match[3]))

    @property
    def has_sums(self) -> bool:
        return self.element == "int8"

    def nbytes(self, k: int, n: int) -> int:
        """Bytes that a packed K x N matrix fills."""
        return packed_bytes(n, k, self.nr, self.vk, self.has_sums)


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """B's own element type, and columns of a panel. Kernels whose warp tile has as many columns share a packed B."""

    element: str
    columns: int

    def __str__(self) -> str:
        return f"bvector-{self.element}-n{self.columns}"

    @classmethod
    def parse(cls, text: str, field: str) -> VectorFormat:
        """The inverse of ``str``. Raises ``InvalidArgumentError`` naming ``field``."""
        match = _VECTORS.fullmatch(text)
        if match is None:
            raise _unknown(text, field)
        return cls(match[1], int(match[2]))

    @property
    def values(self) -> int:
        """Consecutive values of k that lie together."""
        return _VECTOR_BYTES // DType(self.element).bytes

    def stride(self, k: int) -> int:
        """Elements from panel to panel: what kernels are given as B's leading dimension."""
        depth = _DEPTH_BYTES // DType(self.element).bytes
        return -(-k // depth) * depth * self.columns

    def nbytes(self, k: int, n: int) -> int:
        """Bytes that a packed K x N matrix fills."""
        return -(-n // self.columns) * self.stride(k) * DType(self.element).bytes

    def beyond(self, k: int, n: int) -> str:
        """Why kernels cannot read a packed K x N matrix: it does not fit a buffer; empty if it does."""
        nbytes = self.nbytes(k, n)
        return f"packed, B has {nbytes} bytes; AMD kernels read less than 2**31" if nbytes >= _BUFFER_BYTES else ""


Packing = PackedFormat | VectorFormat


def parse_packing(text: str, field: str) -> Packing:
    """A format by its text. Raises ``InvalidArgumentError`` naming ``field``."""
    return VectorFormat.parse(text, field) if _VECTORS.fullmatch(text) else PackedFormat.parse(text, field)


def format_of(dtype_a: DType, warp_tile: tuple[int, int, int]) -> PackedFormat:
    """The packed format that a CPU kernel of this warp tile reads."""
    _, nr, vk = warp_tile
    if dtype_a == DType.INT8:
        element = {1: "int32", 2: "int16"}.get(vk, "int8")
    else:
        element = "fp32" if vk == 1 else "bf16"
    return PackedFormat(element, nr, vk)


def packing_of(config: GemmConfig, arch: ArchSpec) -> Packing:
    """The packed format that a pre-shuffle kernel reads (or, if it packs, writes)."""
    if arch.kind == "cpu":
        return format_of(config.dtype_a, config.warp_tile)
    return VectorFormat(config.b, config.warp_tile[1])


def _unknown(text: str, field: str) -> InvalidArgumentError:
    return refuse(
        f"{field} is in packed format {text!r}, which is not one of GEMM's",
        f"{field}.packing",
        text,
        "packing_format",
        "pack B with the operation gemm_pack_b",
    )

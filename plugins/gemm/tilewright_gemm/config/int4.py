"""The contract of packed 4-bit weights: how B is stored, scaled and shifted, and what a product with it is.

    out = sum over groups of k of scale_b[j, group] * (sum of A[i, k] * (B[k, j] - zero_b[j, group]) over the group)

B's values are unsigned numbers of 4 bits, two a byte along k: byte ``b[i, j]`` holds ``B[2 i, j]`` in its low four bits
and ``B[2 i + 1, j]`` in its high ones. ``b`` is [.., ceil(K / 2), N] of bytes (``int8``) whose columns are contiguous:
the transposed view of weights [N, ceil(K / 2)]. Of an odd K the last high bits are not used.

Groups are 128 long along k, the last one shorter. Each column has a factor for each group: ``scale_b`` is
[.., N, ceil(K / 128)] of fp32, fp16 or bf16, indexed by columns of B first, as weights [N, K] are. ``zero_b``, of the
same shape, has numbers from 0 to 15 in bytes (``int8``; only the low four bits count); without it all are 8, which
makes the values two's complements with the sign bit flipped. Strides of both are free.

Differences of values and zero points are exact in the type of A, so sums within a group are those of a product of A's
type; they are scaled and added in fp32. ``scale_a`` (a number, or one for each row), alpha, bias, D and the activation
follow as for any product.
"""

from __future__ import annotations

from tilewright_gemm.vocabulary import ScaleB
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.dtypes import DType

__all__ = [
    "DTYPES",
    "GROUP_K",
    "INT4_PIPELINE",
    "INT4_RING",
    "MIDDLE",
    "SCALE_DTYPES",
    "group_shape",
    "has_zeros",
    "is_int4",
    "packed_rows",
    "scale_dtype",
    "scale_kind",
    "scale_struct",
]

GROUP_K = 128
"""Elements along k of every group."""
MIDDLE = 8
"""The zero point of columns that have none of their own."""
DTYPES = (DType.FP16, DType.BF16, DType.FP8, DType.INT8)
"""Element types of A. All hold the integers from -15 to 15 exactly."""
SCALE_DTYPES = (DType.FP32, DType.FP16, DType.BF16)

INT4_PIPELINE, INT4_RING = "compv3", "compv4"
"""Pipelines: values are unpacked on their way through registers to shared memory; or, on CUDA devices, from a ring of
packed bytes in shared memory to the registers that multiply them.
"""

_KINDS: dict[tuple[DType, bool], ScaleB] = {
    (DType.FP32, False): ScaleB.INT4_FP32,
    (DType.FP16, False): ScaleB.INT4_FP16,
    (DType.BF16, False): ScaleB.INT4_BF16,
    (DType.FP32, True): ScaleB.INT4_FP32_ZEROS,
    (DType.FP16, True): ScaleB.INT4_FP16_ZEROS,
    (DType.BF16, True): ScaleB.INT4_BF16_ZEROS,
}
_MEANINGS = {kind: meaning for meaning, kind in _KINDS.items()}


def is_int4(scale_b: ScaleB) -> bool:
    """True if B is packed 4-bit weights."""
    return scale_b in _MEANINGS


def has_zeros(scale_b: ScaleB) -> bool:
    """True if the groups of a packed B have zero points of their own."""
    return scale_b in _MEANINGS and _MEANINGS[scale_b][1]


def scale_dtype(scale_b: ScaleB) -> DType:
    """Element type of ``scale_b``, whatever it scales."""
    return _MEANINGS[scale_b][0] if scale_b in _MEANINGS else DType.FP32


def scale_kind(dtype: DType, zeros: bool) -> ScaleB:
    """The kind of scales of packed weights. ``KeyError`` if there is none of this type."""
    return _KINDS[dtype, zeros]


def packed_rows(k: int) -> int:
    """Bytes of a column."""
    return ceil_div(k, 2)


def group_shape(n: int, k: int) -> tuple[int, int]:
    """Shape of ``scale_b`` and ``zero_b``, batch dimensions aside."""
    return n, ceil_div(k, GROUP_K)


def scale_struct(scale_b: ScaleB, kernel: str) -> str:
    """The struct of ``tilewright/core/int4.hpp`` that makes a configuration of C++ one with packed weights."""
    return f"tw::I{scale_b.value[1:]}<{kernel}>"

"""Weights of 4 bits in groups of 128: quantised, packed, and read from the layouts of GPTQ and AWQ. NumPy throughout,
once for each model; ``Int4Weights.to`` takes the result to a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewright.errors import InvalidArgumentError
from tilewright.types.dtypes import DTypeLike, element_type
from tilewright.types.spec import Array

__all__ = ["GROUP", "Int4Weights", "int4_from_awq", "int4_from_gptq", "pack_int4", "quantize_int4", "unpack_int4"]

GROUP = 128
"""Values along k that share a factor and a zero point."""
FORMAT = "int4_128"
_MIDDLE = 8
_NIBBLES = 8
"""In a word of 32 bits."""
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of AWQ's four-bit fields, lowest first."""


@dataclass(frozen=True)
class Int4Weights:
    """A second factor ``[..., K, N]`` of 4-bit values. ``gemm`` takes it for ``b``.

    ``b`` is ``[..., ceil(K / 2), N]`` of int8 with contiguous columns, the even k in the low four bits; ``scale_b`` is
    ``[..., N, ceil(K / 128)]``, ``zero_b`` likewise, or None: 8 everywhere. A value stands for
    ``(q - zero_b) * scale_b``.
    """

    b: Any
    scale_b: Any
    zero_b: Any = None

    def to(self, place: Callable[[Any], Any]) -> Int4Weights:
        """The same weights with every array taken somewhere: ``weights.to(client.asarray)``. ``place`` gets arrays as
        weights lie in memory, ``[..., N, ceil(K / 2)]``.
        """
        found = replace(self, b=_turned(place(_turned(self.b))), scale_b=place(self.scale_b))
        return found if self.zero_b is None else replace(found, zero_b=place(self.zero_b))


def _turned(array: Any) -> Any:
    return array.swapaxes(-1, -2)


def _wrong(reason: str, field: str, value: object, fix: str) -> InvalidArgumentError:
    return InvalidArgumentError(reason, field=field, value=value, rule="int4_weights", fix=fix)


def pack_int4(values: Array) -> Array:
    """Unsigned values ``[..., N, K]`` from 0 to 15 as bytes ``[..., N, ceil(K / 2)]`` of int8, the even k low. Of an
    odd K the last high bits are zero.
    """
    given = np.asarray(values)
    if given.dtype.kind not in "iu" or given.ndim < 2:
        raise _wrong(
            "4-bit values are a matrix of integers", "values", str(given.dtype), "give integers [.., N, K] from 0 to 15"
        )
    if given.size and (given.min() < 0 or given.max() > 15):
        worst = int(given.max() if given.max() > 15 else given.min())
        raise _wrong(f"{worst} is no unsigned number of 4 bits", "values", worst, "add 8 to signed values")
    wide = given.astype(np.uint8)
    if wide.shape[-1] % 2:
        wide = np.concatenate([wide, np.zeros((*wide.shape[:-1], 1), np.uint8)], axis=-1)
    packed: Array = (wide[..., ::2] | wide[..., 1::2] << 4).view(np.int8)
    return packed


def unpack_int4(packed: Array, k: int) -> Array:
    """The values ``[..., N, K]`` in bytes ``[..., N, ceil(K / 2)]``, as uint8 from 0 to 15."""
    own = np.ascontiguousarray(packed).view(np.uint8)
    pairs: Array = np.stack([own & 15, own >> 4], axis=-1).reshape(*own.shape[:-1], -1)
    if pairs.shape[-1] - k not in (0, 1):
        raise _wrong(
            f"{own.shape[-1]} bytes do not hold {k} values of 4 bits", "k", k, f"give {pairs.shape[-1]} or one less"
        )
    return pairs[..., :k]


def quantize_int4(weights: Array, *, zeros: bool = False, scale_dtype: DTypeLike = "fp16") -> Int4Weights:
    """Weights ``[..., N, K]`` of floats, each to the nearest of the 16 values of its group.

    A group's values reach from its least to its greatest one; with ``zeros`` they have a zero point of their own, else
    it is in the middle. This is rounding to nearest; methods that look at activations come out better, and
    ``int4_from_gptq`` and ``int4_from_awq`` read theirs.
    """
    own = np.asarray(weights, np.float32)
    if own.ndim < 2:
        raise _wrong("weights have two dimensions at least", "weights", own.shape, "give [.., N, K]")
    count, k = -(-own.shape[-1] // GROUP), own.shape[-1]
    spread = np.zeros((*own.shape[:-1], count * GROUP), np.float32)
    spread[..., :k] = own
    grouped = spread.reshape(*own.shape[:-1], count, GROUP)
    low, high = (np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)) if k else (spread, spread)
    step = (high - low) / 15 if zeros else np.maximum(high / 7, -low / 8)
    scale = np.where(step > 0, step, 1).astype(element_type(scale_dtype, "scale_dtype"))
    used = scale.astype(np.float32)
    used = np.where(used > 0, used, 1)
    zero = np.clip(np.rint(-low / used), 0, 15) if zeros else np.full(scale.shape, _MIDDLE, np.float32)
    values = np.clip(np.rint(grouped / used[..., None]) + zero[..., None], 0, 15).astype(np.uint8)
    packed = pack_int4(values.reshape(spread.shape)[..., :k])
    return Int4Weights(_turned(packed), scale, zero.astype(np.int8) if zeros else None)


def _fields(words: Array, field: str) -> Array:
    """The eight fields of every word, the lowest first, as a last dimension."""
    given = np.asarray(words)
    if given.dtype not in (np.dtype(np.int32), np.dtype(np.uint32)) or given.ndim != 2:
        raise _wrong(f"{field} is no matrix of 32-bit words", field, str(given.dtype), "pass it as it is in the file")
    found: Array = given.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    return found.astype(np.uint8)


def _groups_of(scales: Array, k: int, n: int) -> Array:
    own = np.asarray(scales)
    if own.shape != (-(-k // GROUP), n):
        raise _wrong(
            f"scales are {own.shape}; groups of {GROUP} need {(-(-k // GROUP), n)}", "scales", own.shape,
            f"only groups of {GROUP} have kernels: quantise with group_size={GROUP}",
        )  # fmt: skip
    return np.ascontiguousarray(own.T)


def int4_from_gptq(
    qweight: Array, qzeros: Array, scales: Array, g_idx: Array | None = None, *, stored_less_one: bool = True
) -> Int4Weights:
    """GPTQ's tensors of a layer: ``qweight`` int32 [K / 8, N] (eight k a word), ``qzeros`` int32 [K / 128, N / 8]
    (eight columns a word), ``scales`` [K / 128, N].

    Files of the usual format store zero points less one (``stored_less_one``; the later "v2" does not). Groups must
    follow one another along k: for an activation order (``g_idx``) that they do not, quantise without it.
    """
    fields = _fields(qweight, "qweight")
    k, n = fields.shape[0] * _NIBBLES, fields.shape[1]
    if g_idx is not None and not np.array_equal(np.asarray(g_idx), np.arange(k) // GROUP):
        raise _wrong(
            "groups do not follow one another along k", "g_idx", "", "quantise without an activation order (desc_act)"
        )
    values = fields.transpose(1, 0, 2).reshape(n, k)
    zero = _fields(qzeros, "qzeros").reshape(-(-k // GROUP), -1)[:, :n].T.astype(np.int16) + bool(stored_less_one)
    if zero.max(initial=0) > 15:
        raise _wrong("a zero point of 16 is none of 4 bits", "qzeros", 16, "pass stored_less_one=False for format v2")
    return Int4Weights(_turned(pack_int4(values)), _groups_of(scales, k, n), np.ascontiguousarray(zero.astype(np.int8)))


def int4_from_awq(qweight: Array, qzeros: Array, scales: Array) -> Int4Weights:
    """AWQ's tensors of a layer: ``qweight`` int32 [K, N / 8] and ``qzeros`` int32 [K / 128, N / 8] (eight columns a
    word, in the order 0, 2, 4, 6, 1, 3, 5, 7), ``scales`` [K / 128, N].
    """
    values, zero = (_awq_columns(_fields(words, name)) for words, name in ((qweight, "qweight"), (qzeros, "qzeros")))
    return Int4Weights(
        _turned(pack_int4(np.ascontiguousarray(values.T))),
        _groups_of(scales, *values.shape),
        np.ascontiguousarray(zero.T.astype(np.int8)),
    )


def _awq_columns(fields: Array) -> Array:
    found = np.empty_like(fields)
    found[..., _AWQ_COLUMNS] = fields
    return found.reshape(fields.shape[0], -1)

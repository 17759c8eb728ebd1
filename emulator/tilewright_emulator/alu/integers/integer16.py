"""Integer instructions of the vector unit on 16 bits, one at a time and in packed pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright_emulator.alu.integers.integer32 import middle
from tilewright_emulator.decode.modifiers import SATURATING
from tilewright_emulator.decode.registry import semantic
from tilewright_emulator.isa.registers import Array

U16, I16, U32, I32, I64 = np.uint16, np.int16, np.uint32, np.int32, np.int64
Binary = Callable[[Array, Array], Array]
LIMITS = {"u16": (0, 0xFFFF), "i16": (-0x8000, 0x7FFF)}


def _register(names: str, kind: str, function: Callable[..., Array], sources: int) -> None:
    semantic(*names.split(), dst=kind, src=" ".join([kind] * sources))(function)


def _saturating(names: str, function: Callable[..., Array], kind: str) -> None:
    low, high = LIMITS[kind]

    def saturated(*sources: Array) -> Array:
        return np.asarray(np.clip(function(*(s.astype(I64) for s in sources)), low, high).astype(sources[0].dtype))

    SATURATING.update(dict.fromkeys(names.split(), saturated))


def _sum(a: Array, b: Array) -> Array:
    return np.asarray(a + b)


def _difference(a: Array, b: Array) -> Array:
    return np.asarray(a - b)


def _reversed_difference(a: Array, b: Array) -> Array:
    return np.asarray(b - a)


def _product_sum(a: Array, b: Array, c: Array) -> Array:
    return np.asarray(a * b + c)


# ---- one at a time ----

for _names, _kind, _function, _sources in (
    ("v_add_u16 v_add_nc_u16", "u16", _sum, 2),
    ("v_sub_u16 v_sub_nc_u16", "u16", _difference, 2),
    ("v_subrev_u16", "u16", _reversed_difference, 2),
    ("v_add_i16 v_add_nc_i16", "i16", _sum, 2),
    ("v_sub_i16 v_sub_nc_i16", "i16", _difference, 2),
    ("v_mad_u16 v_mad_legacy_u16", "u16", _product_sum, 3),
    ("v_mad_i16 v_mad_legacy_i16", "i16", _product_sum, 3),
):
    _register(_names, _kind, _function, _sources)
    _saturating(_names, _function, _kind)

_register("v_mul_lo_u16", "u16", np.multiply, 2)
_register("v_not_b16", "u16", np.invert, 1)
_register("v_and_b16", "u16", np.bitwise_and, 2)
_register("v_or_b16", "u16", np.bitwise_or, 2)
_register("v_xor_b16", "u16", np.bitwise_xor, 2)


def _shift_left(a: Array, b: Array) -> Array:
    return np.asarray(b << (a & U16(15)))


def _shift_right(a: Array, b: Array) -> Array:
    return np.asarray(b >> (a & a.dtype.type(15)))


_register("v_lshlrev_b16", "u16", _shift_left, 2)
_register("v_lshrrev_b16", "u16", _shift_right, 2)
_register("v_ashrrev_i16", "i16", _shift_right, 2)
for _kind in ("u16", "i16"):
    _register(f"v_min_{_kind}", _kind, np.minimum, 2)
    _register(f"v_max_{_kind}", _kind, np.maximum, 2)
    _register(f"v_min3_{_kind}", _kind, lambda a, b, c: np.minimum(np.minimum(a, b), c), 3)
    _register(f"v_max3_{_kind}", _kind, lambda a, b, c: np.maximum(np.maximum(a, b), c), 3)
    _register(f"v_med3_{_kind}", _kind, middle, 3)

# ---- packed pairs ----

for _names, _kind, _function, _sources in (
    ("v_pk_add_u16", "u16", _sum, 2),
    ("v_pk_sub_u16", "u16", _difference, 2),
    ("v_pk_add_i16", "i16", _sum, 2),
    ("v_pk_sub_i16", "i16", _difference, 2),
    ("v_pk_mad_u16", "u16", _product_sum, 3),
    ("v_pk_mad_i16", "i16", _product_sum, 3),
):
    _register(_names, f"pk_{_kind}", _function, _sources)
    _saturating(_names, _function, _kind)

_register("v_pk_mul_lo_u16", "pk_u16", np.multiply, 2)
_register("v_pk_lshlrev_b16", "pk_u16", _shift_left, 2)
_register("v_pk_lshrrev_b16", "pk_u16", _shift_right, 2)
_register("v_pk_ashrrev_i16", "pk_i16", _shift_right, 2)
for _kind in ("u16", "i16"):
    _register(f"v_pk_min_{_kind}", f"pk_{_kind}", np.minimum, 2)
    _register(f"v_pk_max_{_kind}", f"pk_{_kind}", np.maximum, 2)


@semantic("v_pack_b32_f16", src="f16 f16")
def pack(a: Array, b: Array) -> Array:
    return np.asarray(a.view(U16).astype(U32) | (b.view(U16).astype(U32) << U32(16)))


@semantic("v_pk_mov_b32", dst="pk_u32", src="word word")
def move_pair(a: Array, b: Array) -> Array:
    """The low result from source 0, the high one from source 1, each from the register of the pair that op_sel says."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    return np.stack([np.broadcast_to(a, shape), np.broadcast_to(b, shape)])

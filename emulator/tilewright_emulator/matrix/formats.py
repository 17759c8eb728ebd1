"""How matrix instructions read the registers of an operand as numbers.

A reader takes registers as uint32 ``(registers, waves, lanes)`` and gives float32 ``(waves, lanes, elements)``, the
lowest bits of the first register first. Every format of 16 bits or fewer fits float32 exactly, integers too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tilewright_emulator.isa import number_formats as formats
from tilewright_emulator.isa.number_formats import SmallFloat
from tilewright_emulator.isa.registers import Array

U8, U16, U32 = np.uint8, np.uint16, np.uint32
Unpack = Callable[[Array], Array]


def _by_lane(registers: Array) -> Array:
    """uint32 ``(waves, lanes, registers)``, contiguous."""
    return np.ascontiguousarray(registers.transpose(1, 2, 0))


def _floats(registers: Array) -> Array:
    return np.asarray(_by_lane(registers).view(np.float32))


def _short_mantissa(registers: Array) -> Array:
    """float32 of which 10 bits of the mantissa count (xf32)."""
    return np.asarray((_by_lane(registers) & U32(0xFFFFE000)).view(np.float32))


def _halves(registers: Array) -> Array:
    return formats.halves_to_f32(_by_lane(registers).view(U16))


def _flushed_halves(registers: Array) -> Array:
    values = _halves(registers)
    return np.where(np.abs(values) < np.float32(2.0**-14), np.float32(0), values)


def _bfloats(registers: Array) -> Array:
    return np.asarray((_by_lane(registers).view(U16).astype(U32) << U32(16)).view(np.float32))


def _flushed_bfloats(registers: Array) -> Array:
    values = _bfloats(registers)
    return np.where(np.abs(values) < np.float32(2.0**-126), np.float32(0), values)


def _signed_bytes(registers: Array) -> Array:
    return np.asarray(_by_lane(registers).view(np.int8).astype(np.float32))


def _unsigned_bytes(registers: Array) -> Array:
    return np.asarray(_by_lane(registers).view(U8).astype(np.float32))


def _small(kind: SmallFloat) -> Unpack:
    """Codes packed without gaps, of 4, 6 or 8 bits."""
    if kind.width == 8:
        return lambda registers: kind.table[_by_lane(registers).view(U8)]
    weights = (1 << np.arange(kind.width)).astype(U8)

    def unpack(registers: Array) -> Array:
        octets = _by_lane(registers).view(U8)
        bits = np.unpackbits(octets, axis=-1, bitorder="little")
        codes = bits.reshape(*bits.shape[:-1], -1, kind.width) @ weights
        return np.asarray(kind.table[codes])

    return unpack


BITS = {
    "f32": 32,
    "xf32": 32,
    "f16": 16,
    "bf16": 16,
    "i8": 8,
    "u8": 8,
    "fp8": 8,
    "bf8": 8,
    "fp6": 6,
    "bf6": 6,
    "fp4": 4,
}
PLAIN: dict[str, Unpack] = {
    "f32": _floats,
    "xf32": _short_mantissa,
    "f16": _halves,
    "bf16": _bfloats,
    "i8": _signed_bytes,
    "u8": _unsigned_bytes,
}


@functools.cache
def unpacker(arch: str, name: str) -> Unpack:
    """The reader of a format. gfx90a takes subnormal 16-bit floats as zeros in its matrix instructions."""
    if arch == "gfx90a" and name in ("f16", "bf16"):
        return _flushed_halves if name == "f16" else _flushed_bfloats
    if name in PLAIN:
        return PLAIN[name]
    if name in ("fp8", "bf8"):
        return _small(formats.eight_bit(arch, name))
    return _small({"fp6": formats.FP6, "bf6": formats.BF6, "fp4": formats.FP4}[name])

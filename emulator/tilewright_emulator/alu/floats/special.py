"""Functions that hardware approximates.

Where the ISA states an accuracy (one unit in the last place of float32; about 2^29 times coarser for float64), results
here are the rounded true values, and those of float64 are cut to 28 bits, so that a kernel which relies on
more fails. Float32 functions take subnormal operands as zeros and give zeros for subnormal results: hardware may.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright_emulator.decode.registry import semantic
from tilewright_emulator.isa.registers import Array

U64 = np.uint64
F16, F32, F64 = np.float16, np.float32, np.float64
TINY = F32(1.1754943508222875e-38)
Unary = Callable[[Array], Array]


def _flushed(a: Array) -> Array:
    return np.where(np.abs(a) < TINY, np.copysign(F32(0), a), a)


def _root(a: Array) -> Array:
    return np.asarray(np.sqrt(a))


def _reciprocal(a: Array) -> Array:
    return np.asarray(1 / a)


def _reciprocal_root(a: Array) -> Array:
    return np.asarray(1 / np.sqrt(a))


def _turn(a: Array) -> Array:
    """The angle of x turns, without the whole ones; beyond 256 turns hardware gives up and takes none."""
    return np.where(np.abs(a) <= 256, (a - np.floor(a)) * (2 * np.pi), np.where(np.isfinite(a), 0.0, np.nan))


def _sine(a: Array) -> Array:
    return np.asarray(np.sin(_turn(a)))


def _cosine(a: Array) -> Array:
    return np.asarray(np.cos(_turn(a)))


FUNCTIONS: dict[str, Unary] = {
    "exp": np.exp2,
    "log": np.log2,
    "rcp": _reciprocal,
    "rsq": _reciprocal_root,
    "sqrt": _root,
    "sin": _sine,
    "cos": _cosine,
}


def _wide(function: Unary) -> Unary:
    """float32 through float64, subnormals flushed on both ends."""
    return lambda a: _flushed(function(_flushed(a).astype(F64)).astype(F32))


def _half(function: Unary) -> Unary:
    return lambda a: function(a.astype(F64)).astype(F16)


def _coarse(function: Unary) -> Unary:
    """float64 with the places cut that hardware does not deliver."""
    return lambda a: (np.ascontiguousarray(function(a)).view(U64) & ~U64((1 << 24) - 1)).view(F64)


for _name, _function in FUNCTIONS.items():
    semantic(f"v_{_name}_f32", dst="f32", src="f32")(_wide(_function))
    semantic(f"v_{_name}_f16", dst="f16", src="f16")(_half(_function))
    if _name not in ("sin", "cos"):
        semantic(f"v_s_{_name}_f32", dst="f32", src="f32")(_wide(_function))
        semantic(f"v_s_{_name}_f16", dst="f16", src="f16")(_half(_function))
for _name in ("rcp", "rsq", "sqrt"):
    semantic(f"v_{_name}_f64", dst="f64", src="f64")(_coarse(FUNCTIONS[_name]))
semantic("v_rcp_iflag_f32", dst="f32", src="f32")(_wide(_reciprocal))

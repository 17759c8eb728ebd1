"""Number formats of AMD GPUs as bits in NumPy arrays, and the arithmetic that NumPy itself does not round as they do.

Everything works on whole arrays of any shape. Registers are ``uint32``; a 16-bit value lies in the low half. Nothing
here knows instructions: modules of ``alu`` and ``matrix`` say which instruction uses what.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# Element types of arrays; NumPy's functions lose the element type, so these are names for readers only.
Bits: TypeAlias = npt.NDArray[Any]
Float32: TypeAlias = npt.NDArray[Any]
Float64: TypeAlias = npt.NDArray[Any]
Float16: TypeAlias = npt.NDArray[Any]

U32 = np.uint32
LOW = U32(0xFFFF)
SIGN = U32(0x80000000)
F16_SCALE, F16_BEYOND = np.float32(2.0**112), np.float32(65536)


# ---- registers as numbers and back ----


def f32(bits: Bits) -> Float32:
    """The same bits as float32."""
    return bits.view(np.float32)


def bits32(values: npt.NDArray[Any]) -> Bits:
    """float32 values (others are rounded to float32 first) as bits."""
    return np.asarray(values, np.float32).view(U32)


def f16(bits: Bits) -> Float16:
    """The low half as float16."""
    return bits.astype(np.uint16).view(np.float16)


def halves_to_f32(halves: npt.NDArray[np.uint16]) -> Float32:
    """float16 bits to float32, exactly: eight times as fast as NumPy's conversion, for the matrix instructions."""
    wide = halves.view(np.int16).astype(np.int32)
    wide <<= 13
    wide &= np.int32(-0x70002000)  # sign, exponent and fraction at float32's places, the exponent 112 too small
    values: Float32 = wide.view(np.float32)
    values *= F16_SCALE
    if values.size and max(values.max(), -values.min()) >= F16_BEYOND:
        return np.asarray(halves.view(np.float16).astype(np.float32))  # infinities or NaNs
    return values


def bits16(values: npt.NDArray[Any]) -> Bits:
    """Values, rounded once to float16, in the low half; the high half is zero."""
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float16).view(np.uint16).astype(U32)


def bf16_to_f32(bits: Bits) -> Float32:
    """The low half as bfloat16, exactly, in float32."""
    values: Float32 = (bits << U32(16)).view(np.float32)
    return values


def f32_to_bf16(bits: Bits) -> Bits:
    """float32 bits to bfloat16 in the low half: to nearest even; a NaN stays one (quiet, upper payload kept)."""
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    nan = (bits & U32(0x7FFFFFFF)) > U32(0x7F800000)
    if nan.any():
        return np.asarray(np.where(nan, (bits >> U32(16)) | U32(0x40), rounded))
    return np.asarray(rounded)


# ---- fused multiply-add, rounded once ----


def sum_to_odd(x: Float64, y: Float64) -> Float64:
    """x + y rounded to odd: what a later rounding to 50 bits or fewer makes of it is the sum rounded once."""
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)
    fix = (error != 0) & np.isfinite(error) & np.isfinite(total)
    if not fix.any():
        return total
    raw = total.view(np.int64)
    towards_zero = (error > 0) != (total > 0)
    odd = np.where((raw & 1) == 0, np.where(towards_zero, raw - 1, raw + 1), raw)
    fixed: Float64 = np.where(fix, odd, raw).view(np.float64)
    return fixed


def fma32(x: Float32, y: Float32, z: Float32) -> Float32:
    """x * y + z in float32, rounded once, subnormals kept.

    The product of two float32 is exact in float64; only the sum is rounded there. That second rounding can only show
    where the float64 sum lies halfway between two float32 or where float32 has fewer bits (subnormals): then, and
    only then, the slow way is taken.
    """
    product = np.multiply(x, y, dtype=np.float64)
    total = product + z
    raw = total.view(np.uint64)
    risky = (raw & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    small = (np.abs(total) < 1.1754943508222875e-38) & (total != 0)  # no product is so small that float64 loses it
    if risky.any() or small.any():
        total = sum_to_odd(product, np.broadcast_to(np.asarray(z, np.float64), product.shape))
    return total.astype(np.float32)


def fma16(x: Float16, y: Float16, z: Float16) -> Float16:
    """x * y + z in float16, rounded once."""
    product = np.multiply(x, y, dtype=np.float64)
    return sum_to_odd(product, np.broadcast_to(np.asarray(z, np.float64), product.shape)).astype(np.float16)


@functools.cache
def _libm_fma() -> Callable[[Any, Any, Any], Any]:
    library = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
    function = library.fma
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_double] * 3
    each: Callable[[Any, Any, Any], Any] = np.frompyfunc(lambda x, y, z: function(x, y, z), 3, 1)
    return each


def fma64(x: Float64, y: Float64, z: Float64) -> Float64:
    """x * y + z in float64, rounded once (the C library's; element by element, for it is rare)."""
    return np.asarray(_libm_fma()(x, y, z), np.float64)


def toward_zero16(values: Float32) -> Bits:
    """float32 to float16 rounded toward zero (finite values stay finite), in the low half."""
    near = bits16(values)
    back = f16(near).astype(np.float32)
    too_big = (np.abs(back) > np.abs(values)) & np.isfinite(values)
    return np.where(too_big, near - U32(1), near)


# ---- floats of eight bits and fewer ----


@dataclass(frozen=True)
class SmallFloat:
    """A float of at most eight bits: sign, exponent, mantissa.

    ``special`` says what the codes beside numbers are: ``ieee`` (largest exponent is infinity and NaN), ``fn`` (only
    all ones is NaN), ``fnuz`` (only the code of minus zero is NaN), ``none`` (every code is a number).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    def value(self, code: int) -> float:
        """Value of one code."""
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        exponent = code >> self.mantissa_bits & ((1 << self.exponent_bits) - 1)
        sign = -1.0 if code >> (self.width - 1) & 1 else 1.0
        top = (1 << self.exponent_bits) - 1
        if self.special == "fnuz" and code == 1 << (self.width - 1):
            return float("nan")
        if self.special == "ieee" and exponent == top:
            return float("nan") if mantissa else sign * float("inf")
        if self.special == "fn" and exponent == top and mantissa == (1 << self.mantissa_bits) - 1:
            return float("nan")
        if exponent == 0:
            return sign * mantissa * 2.0 ** (1 - self.bias - self.mantissa_bits)
        return sign * (1 + mantissa / (1 << self.mantissa_bits)) * 2.0 ** (exponent - self.bias)

    @functools.cached_property
    def table(self) -> Float32:
        """All codes as float32."""
        return np.array([self.value(code) for code in range(1 << self.width)], np.float32)

    @functools.cached_property
    def _positive(self) -> npt.NDArray[np.float32]:
        half = self.table[: 1 << (self.width - 1)]
        return np.asarray(half[np.isfinite(half)])

    def decode(self, codes: npt.NDArray[Any]) -> Float32:
        """Codes (unsigned integers) as float32, exactly."""
        return np.asarray(self.table[codes])

    def encode(self, values: Float32, saturate: bool = False) -> npt.NDArray[np.uint8]:
        """float32 to codes, to nearest even.

        Beyond the largest number: that number if ``saturate``; otherwise infinity where the format has it, else NaN.
        An infinity saturates likewise. NaN keeps its sign where the format has two.
        """
        size = np.abs(values).astype(np.float64)
        _, exponent = np.frexp(size)
        quantum = np.ldexp(1.0, np.maximum(exponent - 1, 1 - self.bias) - self.mantissa_bits)
        return self._codes(np.rint(size / quantum) * quantum, values, saturate)

    def encode_stochastic(self, bits: Bits, random: Bits, saturate: bool = False) -> npt.NDArray[np.uint8]:
        """float32 bits to codes: random bits are added below the last place that stays, the rest is cut off.

        The upper bits of ``random`` are used, as many as the cut removes from a normal number. A number that becomes
        subnormal loses more places; the same random bits are aligned with the first place that it loses.
        """
        values = f32(bits)
        size = np.abs(values).astype(np.float64)
        _, exponent = np.frexp(size)
        quantum = np.ldexp(1.0, np.maximum(exponent - 1, 1 - self.bias) - self.mantissa_bits)
        dropped = 23 - self.mantissa_bits
        part = (random >> U32(32 - dropped)).astype(np.float64) * 2.0**-dropped
        return self._codes(np.floor(size / quantum + part) * quantum, values, saturate)

    def _codes(self, size: Float64, values: Float32, saturate: bool) -> npt.NDArray[np.uint8]:
        positive = self._positive
        sign = np.signbit(values).astype(np.uint8) << np.uint8(self.width - 1)
        nan = np.isnan(values)
        known = np.where(nan, 0.0, np.minimum(size, float(positive[-1])))
        code = np.searchsorted(positive, known.astype(np.float32)).astype(np.uint8)
        over = size > float(positive[-1])
        if self.special == "fnuz":
            sign = np.where((code == 0) & ~nan, np.uint8(0), sign)
        code |= sign
        beyond, not_a_number = self._special_codes(sign)
        if not saturate:
            code = np.where(over, beyond, code)
        return np.where(nan, not_a_number, code).astype(np.uint8)

    def _special_codes(self, sign: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        ones = (1 << (self.width - 1)) - 1
        infinity = ones - ((1 << self.mantissa_bits) - 1)
        if self.special == "fnuz":
            code = np.full_like(sign, 1 << (self.width - 1))
            return code, code
        if self.special == "ieee":
            return sign | np.uint8(infinity), sign | np.uint8(ones)
        return sign | np.uint8(ones), sign | np.uint8(ones)


FP8_OCP = SmallFloat("fp8", 4, 3, 7, "fn")
BF8_OCP = SmallFloat("bf8", 5, 2, 15, "ieee")
FP8_FNUZ = SmallFloat("fp8", 4, 3, 8, "fnuz")
BF8_FNUZ = SmallFloat("bf8", 5, 2, 16, "fnuz")
FP6 = SmallFloat("fp6", 2, 3, 1, "none")
BF6 = SmallFloat("bf6", 3, 2, 3, "none")
FP4 = SmallFloat("fp4", 2, 1, 1, "none")


def eight_bit(arch: str, name: str) -> SmallFloat:
    """``fp8`` or ``bf8`` as this chip reads it: without negative zero on gfx940 to gfx942, OCP's elsewhere."""
    fnuz = arch in ("gfx940", "gfx941", "gfx942")
    return {
        ("fp8", True): FP8_FNUZ,
        ("fp8", False): FP8_OCP,
        ("bf8", True): BF8_FNUZ,
        ("bf8", False): BF8_OCP,
    }[name, fnuz]

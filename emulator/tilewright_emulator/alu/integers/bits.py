"""Instructions of the vector unit that move bits about: logic, shifts, fields, counts, byte permutations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tilewright_emulator.alu.integers import scalar
from tilewright_emulator.decode.registry import semantic
from tilewright_emulator.isa.registers import Array

U8, U32, I32, U64, I64 = np.uint8, np.uint32, np.int32, np.uint64, np.int64

semantic("v_and_b32", src="u32 u32")(np.bitwise_and)
semantic("v_or_b32", src="u32 u32")(np.bitwise_or)
semantic("v_xor_b32", src="u32 u32")(np.bitwise_xor)
semantic("v_not_b32", src="u32")(np.invert)
semantic("v_xnor_b32", src="u32 u32")(lambda a, b: ~(a ^ b))
semantic("v_and_or_b32", src="u32 u32 u32")(lambda a, b, c: (a & b) | c)
semantic("v_or3_b32", src="u32 u32 u32")(lambda a, b, c: a | b | c)
semantic("v_xor3_b32", src="u32 u32 u32")(lambda a, b, c: a ^ b ^ c)
semantic("v_lshl_or_b32", src="u32 u32 u32")(lambda a, b, c: (a << (b & U32(31))) | c)
semantic("v_bfi_b32", src="u32 u32 u32")(lambda a, b, c: (a & b) | (~a & c))

# The amount comes first: the instructions are the reversed ones.
semantic("v_lshlrev_b32", src="u32 u32")(lambda a, b: b << (a & U32(31)))
semantic("v_lshrrev_b32", src="u32 u32")(lambda a, b: b >> (a & U32(31)))
semantic("v_ashrrev_i32", dst="i32", src="i32 i32")(lambda a, b: b >> (a & I32(31)))
semantic("v_lshlrev_b64", dst="u64", src="u32 u64")(lambda a, b: b << (a & U32(63)).astype(U64))
semantic("v_lshrrev_b64", dst="u64", src="u32 u64")(lambda a, b: b >> (a & U32(63)).astype(U64))
semantic("v_ashrrev_i64", dst="i64", src="u32 i64")(lambda a, b: b >> (a & U32(63)).astype(I64))


# ---- fields ----


@semantic("v_bfe_u32", src="u32 u32 u32")
def extract(a: Array, b: Array, c: Array) -> Array:
    return np.asarray((a >> (b & U32(31))) & ((U32(1) << (c & U32(31))) - U32(1)))


@semantic("v_bfe_i32", dst="i32", src="i32 i32 i32")
def extract_signed(a: Array, b: Array, c: Array) -> Array:
    """A field that begins so high that it does not fit is extended with the sign."""
    width = (c & I32(31)).astype(I64)
    shifted = a.astype(I64) >> (b & I32(31))
    unused = np.minimum(I64(64) - width, 63)
    return np.asarray(np.where(width == 0, I32(0), ((shifted << unused) >> unused).astype(I32)))


@semantic("v_bfm_b32", src="u32 u32")
def make_mask(a: Array, b: Array) -> Array:
    return np.asarray(((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)))


@semantic("v_alignbit_b32", src="u32 u32 u32")
def align_bits(a: Array, b: Array, c: Array) -> Array:
    """32 bits out of a:b, from the bit that c says on."""
    wide = (a.astype(U64) << U64(32)) | b
    return np.asarray((wide >> (c & U32(31)).astype(U64)).astype(U32))


@semantic("v_alignbyte_b32", src="u32 u32 u32")
def align_bytes(a: Array, b: Array, c: Array) -> Array:
    wide = (a.astype(U64) << U64(32)) | b
    return np.asarray((wide >> ((c & U32(3)) << U32(3)).astype(U64)).astype(U32))


# ---- counts ----

semantic("v_bfrev_b32", src="u32")(scalar.reverse)
semantic("v_ffbl_b32", "v_ctz_i32_b32", dst="i32", src="u32")(scalar.first_one)
semantic("v_ffbh_u32", "v_clz_i32_u32", dst="i32", src="u32")(scalar.leading_zeros)
semantic("v_ffbh_i32", "v_cls_i32", dst="i32", src="i32")(scalar.leading_signs)


@semantic("v_bcnt_u32_b32", src="u32 u32")
def count_ones(a: Array, b: Array) -> Array:
    return np.asarray(np.bitwise_count(a).astype(U32) + b)


# ---- bytes of two registers in any order ----


@semantic("v_perm_b32", src="u32 u32 u32")
def permute_bytes(a: Array, b: Array, c: Array) -> Array:
    """Each byte of c picks one of a:b (0 is b's lowest), the sign of an odd one (8 to 11), zeros (12) or ones."""
    first = int(c.flat[0])
    if c.shape[-1] == 1 and (c.size == 1 or bool((c == first).all())):
        return np.asarray(_plan(first)(a, b))
    wide = (a.astype(U64) << U64(32)) | b
    result = np.zeros(np.broadcast_shapes(wide.shape, c.shape), U32)
    for place in range(0, 32, 8):
        pick = (c >> U32(place)) & U32(0xFF)
        byte = (wide >> ((pick & U32(7)) << U32(3)).astype(U64)).astype(U8)
        sign = (wide >> (((pick & U32(3)) << U32(4)) + U32(15)).astype(U64)).astype(U8) & U8(1)
        byte = np.where(pick < 8, byte, np.where(pick < 12, sign * U8(255), np.where(pick == 12, U8(0), U8(255))))
        result |= byte.astype(U32) << U32(place)
    return result


Plan = Callable[[Array, Array], Array]


@functools.cache
def _plan(selector: int) -> Plan:
    """The permutation that one selector means, with as few passes as it needs."""
    picks = [selector >> place & 0xFF for place in range(0, 32, 8)]
    low, high = _half(picks[0], picks[1]), _half(picks[2], picks[3])
    if low is not None and high is not None:
        return _halves(low, high)
    constant = U32(sum(0xFF << 8 * place for place, pick in enumerate(picks) if pick > 12))

    def bytes_one_by_one(a: Array, b: Array) -> Array:
        sources = (b, a)
        result: Array | None = None
        for place, pick in enumerate(picks):
            if pick >= 12:
                continue
            if pick < 8:
                value = (sources[pick >> 2] >> U32(8 * (pick & 3))) & U32(0xFF)
            else:
                sign = pick - 8
                value = ((sources[sign >> 1] >> U32(16 * (sign & 1) + 15)) & U32(1)) * U32(0xFF)
            value = value << U32(8 * place)
            result = value if result is None else result | value
        return np.asarray(constant + (a & b & U32(0))) if result is None else np.asarray(result | constant)

    return bytes_one_by_one


def _half(low: int, high: int) -> int | None:
    """The number of the half of a:b (0 is b's low one) that two neighbouring bytes are, if they are one."""
    return low >> 1 if high == low + 1 and low % 2 == 0 and low < 8 else None


def _halves(low: int, high: int) -> Plan:
    keep = U32(0xFFFF)
    if low % 2 == 0 and high % 2 == 0:
        return lambda a, b: ((b, a)[low >> 1] & keep) | ((b, a)[high >> 1] << U32(16))
    if low % 2 == 0:
        return lambda a, b: ((b, a)[low >> 1] & keep) | ((b, a)[high >> 1] & ~keep)
    if high % 2 == 0:
        return lambda a, b: ((b, a)[low >> 1] >> U32(16)) | ((b, a)[high >> 1] << U32(16))
    return lambda a, b: ((b, a)[low >> 1] >> U32(16)) | ((b, a)[high >> 1] & ~keep)

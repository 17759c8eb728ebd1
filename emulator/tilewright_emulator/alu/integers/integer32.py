"""Integer instructions of the vector unit on 32 and 64 bits: sums, products, extremes, comparisons of no flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tilewright_emulator.decode.modifiers import SATURATING
from tilewright_emulator.decode.operands import step_of
from tilewright_emulator.decode.registry import Semantic, Step, builder, semantic
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.state.waves import Waves

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64
LOW24, LOW32 = U32(0xFFFFFF), U64(0xFFFFFFFF)
Pair = tuple[Array, Array]
Binary = Callable[[Array, Array], Array]


# ---- moves ----


@semantic("v_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32", src="u32")
@semantic("v_mov_b64", dst="u64", src="u64")
@semantic("v_mov_b16", dst="u16", src="u16")
def move(a: Array) -> Array:
    return a


@semantic("v_cndmask_b32", dst="f32", src="f32 f32 mask")
@semantic("v_cndmask_b16", dst="u16", src="u16 u16 mask")
def choose(a: Array, b: Array, mask: Array) -> Array:
    return np.where(mask, b, a)


@builder("v_swap_b32", written=2)
def swap(instruction: Instruction, arch: Arch) -> Step:
    first, second = instruction.operand(0).index, instruction.operand(1).index

    def run(w: Waves) -> None:
        one, two = w.u32[first], w.u32[second]
        kept = one.copy()
        np.copyto(one, two, where=w.exec)
        np.copyto(two, kept, where=w.exec)

    return run


# ---- sums ----

semantic("v_add_u32", "v_add_nc_u32", src="u32 u32")(np.add)
semantic("v_sub_u32", "v_sub_nc_u32", src="u32 u32")(np.subtract)
semantic("v_add_i32", "v_add_nc_i32", dst="i32", src="i32 i32")(np.add)
semantic("v_sub_i32", "v_sub_nc_i32", dst="i32", src="i32 i32")(np.subtract)
semantic("v_add_nc_u64", "v_add_u64", dst="u64", src="u64 u64")(np.add)
semantic("v_sub_nc_u64", "v_sub_u64", dst="u64", src="u64 u64")(np.subtract)


@semantic("v_subrev_u32", "v_subrev_nc_u32", src="u32 u32")
def subtract_reversed(a: Array, b: Array) -> Array:
    return np.asarray(b - a)


def _saturated(names: str, function: Binary, low: int, high: int) -> None:
    def saturated(a: Array, b: Array) -> Array:
        return np.asarray(np.clip(function(a.astype(I64), b.astype(I64)), low, high).astype(a.dtype))

    SATURATING.update(dict.fromkeys(names.split(), saturated))


_saturated("v_add_u32 v_add_nc_u32", np.add, 0, 0xFFFFFFFF)
_saturated("v_sub_u32 v_sub_nc_u32", np.subtract, 0, 0xFFFFFFFF)
_saturated("v_subrev_u32 v_subrev_nc_u32", lambda a, b: b - a, 0, 0xFFFFFFFF)
_saturated("v_add_i32 v_add_nc_i32", np.add, -0x80000000, 0x7FFFFFFF)
_saturated("v_sub_i32 v_sub_nc_i32", np.subtract, -0x80000000, 0x7FFFFFFF)


@semantic("v_add_co_u32", dst="u32 mask", src="u32 u32")
def add_carry_out(a: Array, b: Array) -> Pair:
    total = a + b
    return total, total < a


@semantic("v_sub_co_u32", dst="u32 mask", src="u32 u32")
def subtract_borrow_out(a: Array, b: Array) -> Pair:
    return a - b, b > a


@semantic("v_subrev_co_u32", dst="u32 mask", src="u32 u32")
def subtract_reversed_borrow_out(a: Array, b: Array) -> Pair:
    return b - a, a > b


@semantic("v_addc_co_u32", "v_add_co_ci_u32", dst="u32 mask", src="u32 u32 mask")
def add_with_carry(a: Array, b: Array, carry: Array) -> Pair:
    total = a.astype(U64) + b + carry
    return total.astype(U32), total > LOW32


def _subtract(a: Array, b: Array, borrow: Array) -> Pair:
    taken = b.astype(U64) + borrow
    return (a - taken).astype(U32), taken > a


@semantic("v_subb_co_u32", "v_sub_co_ci_u32", dst="u32 mask", src="u32 u32 mask")
def subtract_with_borrow(a: Array, b: Array, borrow: Array) -> Pair:
    return _subtract(a, b, borrow)


@semantic("v_subbrev_co_u32", "v_subrev_co_ci_u32", dst="u32 mask", src="u32 u32 mask")
def subtract_reversed_with_borrow(a: Array, b: Array, borrow: Array) -> Pair:
    return _subtract(b, a, borrow)


@semantic("v_add3_u32", src="u32 u32 u32")
def add3(a: Array, b: Array, c: Array) -> Array:
    return np.asarray(a + b + c)


@semantic("v_lshl_add_u32", src="u32 u32 u32")
def shift_add(a: Array, b: Array, c: Array) -> Array:
    return np.asarray((a << (b & U32(31))) + c)


@semantic("v_add_lshl_u32", src="u32 u32 u32")
def add_shift(a: Array, b: Array, c: Array) -> Array:
    return np.asarray((a + b) << (c & U32(31)))


@semantic("v_lshl_add_u64", dst="u64", src="u64 u32 u64")
def shift_add_wide(a: Array, b: Array, c: Array) -> Array:
    return np.asarray((a << (b & U32(7)).astype(U64)) + c)


@semantic("v_xad_u32", src="u32 u32 u32")
def xor_add(a: Array, b: Array, c: Array) -> Array:
    return np.asarray((a ^ b) + c)


# ---- products ----

semantic("v_mul_lo_u32", src="u32 u32")(np.multiply)


@semantic("v_mul_hi_u32", src="u32 u32")
def multiply_high(a: Array, b: Array) -> Array:
    return np.asarray((a.astype(U64) * b >> U64(32)).astype(U32))


@semantic("v_mul_hi_i32", dst="i32", src="i32 i32")
def multiply_high_signed(a: Array, b: Array) -> Array:
    return np.asarray((a.astype(I64) * b >> I64(32)).astype(I32))


def _extended24(a: Array) -> Array:
    return np.asarray((a << I32(8)) >> I32(8))


@semantic("v_mul_u32_u24", src="u32 u32")
def multiply24(a: Array, b: Array) -> Array:
    return np.asarray((a & LOW24) * (b & LOW24))


@semantic("v_mul_i32_i24", dst="i32", src="i32 i32")
def multiply24_signed(a: Array, b: Array) -> Array:
    return np.asarray(_extended24(a) * _extended24(b))


@semantic("v_mul_hi_u32_u24", src="u32 u32")
def multiply24_high(a: Array, b: Array) -> Array:
    return np.asarray(((a & LOW24).astype(U64) * (b & LOW24) >> U64(32)).astype(U32))


@semantic("v_mul_hi_i32_i24", dst="i32", src="i32 i32")
def multiply24_high_signed(a: Array, b: Array) -> Array:
    return np.asarray((_extended24(a).astype(I64) * _extended24(b) >> I64(32)).astype(I32))


@semantic("v_mad_u32_u24", src="u32 u32 u32")
def multiply24_add(a: Array, b: Array, c: Array) -> Array:
    return np.asarray((a & LOW24) * (b & LOW24) + c)


@semantic("v_mad_i32_i24", dst="i32", src="i32 i32 i32")
def multiply24_add_signed(a: Array, b: Array, c: Array) -> Array:
    return np.asarray(_extended24(a) * _extended24(b) + c)


@semantic("v_mad_u64_u32", "v_mad_co_u64_u32", dst="u64 mask", src="u32 u32 u64")
def multiply_add_wide(a: Array, b: Array, c: Array) -> Pair:
    total = a.astype(U64) * b + c
    return total, total < c


@semantic("v_mad_i64_i32", "v_mad_co_i64_i32", dst="i64 mask", src="i32 i32 i64")
def multiply_add_wide_signed(a: Array, b: Array, c: Array) -> Pair:
    product = a.astype(I64) * b
    total = product + c
    return total, ((product ^ total) & (c ^ total)) < 0


@semantic("v_mad_u32_u16", src="u16 u16 u32")
def multiply16_add(a: Array, b: Array, c: Array) -> Array:
    return np.asarray(a.astype(U32) * b + c)


@semantic("v_mad_i32_i16", dst="i32", src="i16 i16 i32")
def multiply16_add_signed(a: Array, b: Array, c: Array) -> Array:
    return np.asarray(a.astype(I32) * b + c)


# ---- extremes ----


def _extremes(kind: str, types: str) -> None:
    both, three = f"{types} {types}", f"{types} {types} {types}"
    semantic(f"v_min_{kind}", dst=types, src=both)(np.minimum)
    semantic(f"v_max_{kind}", dst=types, src=both)(np.maximum)
    semantic(f"v_min3_{kind}", dst=types, src=three)(lambda a, b, c: np.minimum(np.minimum(a, b), c))
    semantic(f"v_max3_{kind}", dst=types, src=three)(lambda a, b, c: np.maximum(np.maximum(a, b), c))
    semantic(f"v_minmax_{kind}", dst=types, src=three)(lambda a, b, c: np.maximum(np.minimum(a, b), c))
    semantic(f"v_maxmin_{kind}", dst=types, src=three)(lambda a, b, c: np.minimum(np.maximum(a, b), c))
    semantic(f"v_med3_{kind}", dst=types, src=three)(middle)


def middle(a: Array, b: Array, c: Array) -> Array:
    """The middle one of three."""
    return np.asarray(np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)))


for _kind in ("u32", "i32"):
    _extremes(_kind, _kind)


# ---- sums of bytes ----


def _octets(a: Array) -> Array:
    return np.ascontiguousarray(a)[..., None].view(np.uint8)


@semantic("v_sad_u8", src="u32 u32 u32")
def sum_of_differences(a: Array, b: Array, c: Array) -> Array:
    difference = np.abs(_octets(a).astype(I32) - _octets(b)).sum(axis=-1)
    return np.asarray(difference.astype(U32) + c)


@semantic("v_lerp_u8", src="u32 u32 u32")
def average_of_bytes(a: Array, b: Array, c: Array) -> Array:
    mean = (_octets(a).astype(np.uint16) + _octets(b) + (_octets(c) & np.uint8(1))) >> np.uint16(1)
    return np.asarray(np.ascontiguousarray(mean.astype(np.uint8)).view(U32)[..., 0])


# ---- three-operand logic by a table ----


def _by_table(table: int, dtype: type) -> Callable[[Array, Array, Array], Array]:
    """Each result bit is the table's bit number 4a + 2b + c."""

    def function(a: Array, b: Array, c: Array) -> Array:
        result: Array = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), dtype)
        for index in range(8):
            if table >> index & 1:
                result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
        return result

    return function


@builder("v_bitop3_b32", "v_bitop3_b16")
def bitop3(instruction: Instruction, arch: Arch) -> Step:
    kind, dtype = ("u16", np.uint16) if instruction.name.endswith("16") else ("u32", np.uint32)
    function = _by_table(instruction.number("bitop3"), dtype)
    row = Semantic(instruction.name, None, function, None, (kind,), (kind,) * 3, 1)
    others = {name: value for name, value in instruction.modifiers.items() if name != "bitop3"}
    return step_of(row, replace(instruction, modifiers=others), arch)

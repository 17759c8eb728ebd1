"""Integer instructions of the scalar unit. Values are columns ``(waves, 1)``: every wave has its own registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright_emulator.decode.operands import write_bits, write_bits64
from tilewright_emulator.decode.registry import Step, builder, semantic
from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.isa.registers import EXEC, Array
from tilewright_emulator.state.waves import Waves

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64
Pair = tuple[Array, Array]
WIDE = {"b32": "u32", "b64": "u64"}


# ---- moves ----


@semantic("s_mov_b32", src="u32")
@semantic("s_mov_b64", dst="u64", src="u64")
def move(a: Array) -> Array:
    return a


@semantic("s_movk_i32", dst="u32", src="u32")
def move_short(a: Array) -> Array:
    return np.asarray(a.astype(np.int16).astype(I32).view(U32))


@semantic("s_cselect_b32", src="u32 u32 scc")
@semantic("s_cselect_b64", dst="u64", src="u64 u64 scc")
def select(a: Array, b: Array, scc: Array) -> Array:
    return np.where(scc, a, b)


@semantic("s_cmov_b32", src="u32 dst:u32 scc")
@semantic("s_cmov_b64", dst="u64", src="u64 dst:u64 scc")
def conditional_move(a: Array, old: Array, scc: Array) -> Array:
    return np.where(scc, a, old)


@semantic("s_cmovk_i32", src="u32 dst:u32 scc")
def conditional_move_short(a: Array, old: Array, scc: Array) -> Array:
    return np.where(scc, move_short(a), old)


# ---- sums and products ----


@semantic("s_add_u32", "s_add_co_u32", dst="u32 scc", src="u32 u32")
def add_unsigned(a: Array, b: Array) -> Pair:
    total = a + b
    return total, total < a


@semantic("s_sub_u32", "s_sub_co_u32", dst="u32 scc", src="u32 u32")
def subtract_unsigned(a: Array, b: Array) -> Pair:
    return a - b, b > a


@semantic("s_addc_u32", "s_add_co_ci_u32", dst="u32 scc", src="u32 u32 scc")
def add_with_carry(a: Array, b: Array, scc: Array) -> Pair:
    total = a.astype(U64) + b + scc
    return total.astype(U32), total > U64(0xFFFFFFFF)


@semantic("s_subb_u32", "s_sub_co_ci_u32", dst="u32 scc", src="u32 u32 scc")
def subtract_with_borrow(a: Array, b: Array, scc: Array) -> Pair:
    taken = b.astype(U64) + scc
    return (a - taken).astype(U32), taken > a


@semantic("s_add_i32", "s_add_co_i32", dst="i32 scc", src="i32 i32")
def add_signed(a: Array, b: Array) -> Pair:
    total = a.astype(I64) + b
    return total.astype(I32), total != total.astype(I32)


@semantic("s_sub_i32", "s_sub_co_i32", dst="i32 scc", src="i32 i32")
def subtract_signed(a: Array, b: Array) -> Pair:
    total = a.astype(I64) - b
    return total.astype(I32), total != total.astype(I32)


@semantic("s_addk_i32", "s_addk_co_i32", dst="i32 scc", src="i32 dst:i32")
def add_short(a: Array, old: Array) -> Pair:
    total = old.astype(I64) + a.astype(np.int16)
    return total.astype(I32), total != total.astype(I32)


@semantic("s_mulk_i32", dst="i32", src="i32 dst:i32")
def multiply_short(a: Array, old: Array) -> Array:
    return np.asarray(old * a.astype(np.int16).astype(I32))


@semantic("s_absdiff_i32", dst="i32 scc", src="i32 i32")
def absolute_difference(a: Array, b: Array) -> Pair:
    result = np.abs(a - b)
    return result, result != 0


@semantic("s_abs_i32", dst="i32 scc", src="i32")
def absolute(a: Array) -> Pair:
    result = np.abs(a)
    return result, result != 0


semantic("s_add_nc_u64", "s_add_u64", dst="u64", src="u64 u64")(np.add)
semantic("s_sub_nc_u64", "s_sub_u64", dst="u64", src="u64 u64")(np.subtract)
semantic("s_mul_i32", dst="i32", src="i32 i32")(np.multiply)
semantic("s_mul_u64", dst="u64", src="u64 u64")(np.multiply)


@semantic("s_mul_hi_u32", src="u32 u32")
def multiply_high(a: Array, b: Array) -> Array:
    return np.asarray((a.astype(U64) * b >> U64(32)).astype(U32))


@semantic("s_mul_hi_i32", dst="i32", src="i32 i32")
def multiply_high_signed(a: Array, b: Array) -> Array:
    return np.asarray((a.astype(I64) * b >> I64(32)).astype(I32))


def _shift_add(places: int) -> None:
    @semantic(f"s_lshl{places}_add_u32", dst="u32 scc", src="u32 u32")
    def shift_add(a: Array, b: Array) -> Pair:
        total = (a.astype(U64) << U64(places)) + b
        return total.astype(U32), total > U64(0xFFFFFFFF)


for _places in (1, 2, 3, 4):
    _shift_add(_places)


def _extreme(
    name: str, kind: str, pick: Callable[[Array, Array], Array], first: Callable[[Array, Array], Array]
) -> None:
    @semantic(name, dst=f"{kind} scc", src=f"{kind} {kind}")
    def extreme(a: Array, b: Array) -> Pair:
        return pick(a, b), first(a, b)


for _kind in ("u32", "i32"):
    _extreme(f"s_min_{_kind}", _kind, np.minimum, np.less)
    _extreme(f"s_max_{_kind}", _kind, np.maximum, np.greater)


# ---- bits ----

LOGIC: dict[tuple[str, ...], Callable[[Array, Array], Array]] = {
    ("and",): lambda a, b: a & b,
    ("or",): lambda a, b: a | b,
    ("xor",): lambda a, b: a ^ b,
    ("andn2", "and_not1"): lambda a, b: a & ~b,
    ("orn2", "or_not1"): lambda a, b: a | ~b,
    ("nand",): lambda a, b: ~(a & b),
    ("nor",): lambda a, b: ~(a | b),
    ("xnor",): lambda a, b: ~(a ^ b),
}


def _logic(name: str, bits: str, function: Callable[[Array, Array], Array]) -> None:
    @semantic(f"s_{name}_{bits}", dst=f"{WIDE[bits]} scc", src=f"{WIDE[bits]} {WIDE[bits]}")
    def logic(a: Array, b: Array) -> Pair:
        result = function(a, b)
        return result, result != 0


def _saveexec(name: str, bits: str, function: Callable[[Array, Array], Array]) -> None:
    """The destination gets exec; exec becomes a function of the source and exec."""

    @builder(f"s_{name}_saveexec_{bits}")
    def build(instruction: Instruction, arch: Arch) -> Step:
        if (bits == "b64") != (arch.lanes == 64):
            raise UnknownInstruction(f"a mask of the other wave size: {instruction.text}")
        source = instruction.operand(1)
        write = (write_bits64 if bits == "b64" else write_bits)(instruction, instruction.operand(0), arch)
        words = arch.lanes // 32
        if source.kind not in ("s", "constant"):
            raise UnknownInstruction(f"operand {source.text}: {instruction.text}")
        constant = source.value if isinstance(source.value, int) else 0

        def step(w: Waves) -> None:
            if source.kind == "s":
                mask = w.read_mask(source.index)
            else:
                mask = np.full((1, 1), constant == -1)
            old = np.array(w.scalars[:, EXEC : EXEC + words])
            w.set_exec(function(mask, w.exec))
            w.scc = np.asarray(w.exec.any(axis=1, keepdims=True))
            write(w, old if words == 1 else old.view(U64))

        return step


for _names, _function in LOGIC.items():
    for _name in _names:
        for _bits in WIDE:
            _logic(_name, _bits, _function)
            _saveexec(_name, _bits, _function)


def _not1_saveexec(name: str, bits: str, function: Callable[[Array, Array], Array]) -> None:
    _saveexec(name, bits, function)


for _bits in WIDE:
    for _name in ("andn1", "and_not0"):
        _not1_saveexec(_name, _bits, lambda a, b: ~a & b)
    for _name in ("orn1", "or_not0"):
        _not1_saveexec(_name, _bits, lambda a, b: ~a | b)


@semantic("s_not_b32", dst="u32 scc", src="u32")
@semantic("s_not_b64", dst="u64 scc", src="u64")
def invert(a: Array) -> Pair:
    result = ~a
    return result, result != 0


@semantic("s_lshl_b32", dst="u32 scc", src="u32 u32")
def shift_left(a: Array, b: Array) -> Pair:
    result = a << (b & U32(31))
    return result, result != 0


@semantic("s_lshr_b32", dst="u32 scc", src="u32 u32")
def shift_right(a: Array, b: Array) -> Pair:
    result = a >> (b & U32(31))
    return result, result != 0


@semantic("s_ashr_i32", dst="i32 scc", src="i32 i32")
def shift_right_signed(a: Array, b: Array) -> Pair:
    result = a >> (b & I32(31))
    return result, result != 0


@semantic("s_lshl_b64", dst="u64 scc", src="u64 u32")
def shift_left_wide(a: Array, b: Array) -> Pair:
    result = a << (b & U32(63)).astype(U64)
    return result, result != 0


@semantic("s_lshr_b64", dst="u64 scc", src="u64 u32")
def shift_right_wide(a: Array, b: Array) -> Pair:
    result = a >> (b & U32(63)).astype(U64)
    return result, result != 0


@semantic("s_ashr_i64", dst="i64 scc", src="i64 u32")
def shift_right_wide_signed(a: Array, b: Array) -> Pair:
    result = a >> (b & U32(63)).astype(I64)
    return result, result != 0


def _field(a: Array, b: Array, bits: int) -> tuple[Array, Array]:
    """Offset and width that the second source of a bit-field extraction says."""
    return (b & U32(bits - 1)).astype(U64), np.minimum(b >> U32(16) & U32(0x7F), U32(bits)).astype(U64)


@semantic("s_bfe_u32", dst="u32 scc", src="u32 u32")
def extract(a: Array, b: Array) -> Pair:
    offset, width = _field(a, b, 32)
    result = (a >> offset & ((U64(1) << width) - U64(1))).astype(U32)
    return result, result != 0


@semantic("s_bfe_i32", dst="i32 scc", src="i32 u32")
def extract_signed(a: Array, b: Array) -> Pair:
    offset, width = (part.astype(I64) for part in _field(a, b, 32))
    shifted = a.astype(I64) >> offset
    unused = I64(64) - width
    result = np.where(width == 0, 0, (shifted << np.minimum(unused, 63)) >> np.minimum(unused, 63)).astype(I32)
    return result, result != 0


@semantic("s_bfe_u64", dst="u64 scc", src="u64 u32")
def extract_wide(a: Array, b: Array) -> Pair:
    offset, width = _field(a, b, 64)
    mask = np.where(width == 64, ~U64(0), (U64(1) << np.minimum(width, U64(63))) - U64(1))
    result = a >> offset & mask
    return result, result != 0


@semantic("s_bfe_i64", dst="i64 scc", src="i64 u32")
def extract_wide_signed(a: Array, b: Array) -> Pair:
    offset, width = (part.astype(I64) for part in _field(a, b, 64))
    unused = np.clip(I64(64) - width - offset, 0, 63)  # a field that ends beyond the value ends with it
    result = np.where(width == 0, I64(0), (a << unused) >> np.minimum(unused + offset, I64(63)))
    return result, result != 0


@semantic("s_bfm_b32", src="u32 u32")
def make_mask(a: Array, b: Array) -> Array:
    return np.asarray(((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)))


@semantic("s_bfm_b64", dst="u64", src="u32 u32")
def make_mask_wide(a: Array, b: Array) -> Array:
    width, offset = (a & U32(63)).astype(U64), (b & U32(63)).astype(U64)
    return np.asarray(((U64(1) << width) - U64(1)) << offset)


@semantic("s_brev_b32", src="u32")
def reverse(a: Array) -> Array:
    octets = np.ascontiguousarray(a)[..., None].view(np.uint8)[..., ::-1]
    flipped = np.packbits(np.unpackbits(octets, axis=-1), axis=-1, bitorder="little")
    return np.asarray(np.ascontiguousarray(flipped).view(U32)[..., 0])


@semantic("s_bcnt1_i32_b32", dst="u32 scc", src="u32")
@semantic("s_bcnt1_i32_b64", dst="u32 scc", src="u64")
def count_ones(a: Array) -> Pair:
    result = np.bitwise_count(a).astype(U32)
    return result, result != 0


@semantic("s_ff1_i32_b32", "s_ctz_i32_b32", dst="i32", src="u32")
@semantic("s_ff1_i32_b64", "s_ctz_i32_b64", dst="i32", src="u64")
def first_one(a: Array) -> Array:
    lowest = (a & (~a + a.dtype.type(1))) - a.dtype.type(1)
    return np.asarray(np.where(a == 0, I32(-1), np.bitwise_count(lowest).astype(I32)))


@semantic("s_flbit_i32_b32", "s_clz_i32_u32", dst="i32", src="u32")
@semantic("s_flbit_i32_b64", "s_clz_i32_u64", dst="i32", src="u64")
def leading_zeros(a: Array) -> Array:
    smeared = a.copy()
    for places in (1, 2, 4, 8, 16, 32)[: 5 if a.dtype == U32 else 6]:
        smeared |= smeared >> a.dtype.type(places)
    width = I32(8 * a.dtype.itemsize)
    return np.asarray(np.where(a == 0, I32(-1), width - np.bitwise_count(smeared).astype(I32)))


@semantic("s_flbit_i32", "s_cls_i32", dst="i32", src="i32")
def leading_signs(a: Array) -> Array:
    return np.asarray(leading_zeros((a ^ (a >> I32(31))).view(U32)))


@semantic("s_sext_i32_i8", dst="i32", src="i32")
def extend_byte(a: Array) -> Array:
    return np.asarray(a.astype(np.int8).astype(I32))


@semantic("s_sext_i32_i16", dst="i32", src="i32")
def extend_short(a: Array) -> Array:
    return np.asarray(a.astype(np.int16).astype(I32))


def _pack(name: str, low: int, high: int) -> None:
    @semantic(name, src="u32 u32")
    def pack(a: Array, b: Array) -> Array:
        return np.asarray((a >> U32(16 * low) & U32(0xFFFF)) | (b >> U32(16 * high) & U32(0xFFFF)) << U32(16))


for _name, _low, _high in (("ll", 0, 0), ("lh", 0, 1), ("hl", 1, 0), ("hh", 1, 1)):
    _pack(f"s_pack_{_name}_b32_b16", _low, _high)


def _bit_set(name: str, wide: str, value: bool) -> None:
    @semantic(name, dst=wide, src=f"u32 dst:{wide}")
    def set_bit(a: Array, old: Array) -> Array:
        one = old.dtype.type(1) << (a & U32(8 * old.dtype.itemsize - 1)).astype(old.dtype)
        return np.asarray(old | one if value else old & ~one)


def _bit_test(name: str, wide: str, value: int) -> None:
    @semantic(name, dst="scc", src=f"{wide} u32")
    def test_bit(a: Array, b: Array) -> Array:
        shift = (b & U32(8 * a.dtype.itemsize - 1)).astype(a.dtype)
        return np.asarray((a >> shift & a.dtype.type(1)) == value)


for _bits, _wide in WIDE.items():
    for _value in (0, 1):
        _bit_set(f"s_bitset{_value}_{_bits}", _wide, bool(_value))
        _bit_test(f"s_bitcmp{_value}_{_bits}", _wide, _value)

"""Conversions between number formats.

To integers: toward zero (or as the name says), saturating, a NaN gives zero. To float16 and bfloat16: to nearest even.
To 8-bit floats: to nearest even; beyond the largest number infinity or NaN, for FP16_OVFL is not set.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewright_emulator.decode.modifiers import only
from tilewright_emulator.decode.operand_types import selection
from tilewright_emulator.decode.operands import TYPES, Reader, Writer, read_bits, step_of, write_bits
from tilewright_emulator.decode.registry import Semantic, Step, builder, semantic
from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa import number_formats as formats
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.state.waves import Waves

U8, U16, I16, U32, I32 = np.uint8, np.uint16, np.int16, np.uint32, np.int32
F16, F32, F64 = np.float16, np.float32, np.float64
Unary = Callable[[Array], Array]


# ---- to integers ----


def _saturate(values: Array, dtype: type) -> Array:
    limits = np.iinfo(dtype)
    whole = np.where(np.isnan(values), 0.0, values.astype(F64))
    return np.asarray(np.clip(whole, limits.min, limits.max).astype(dtype))


def _to_integer(names: str, dst: str, src: str, rounding: Unary) -> None:
    dtype = {"i32": I32, "u32": U32, "i16": I16, "u16": U16}[dst]

    @semantic(*names.split(), dst=dst, src=src)
    def convert(a: Array) -> Array:
        return _saturate(rounding(a), dtype)


def _nearest_up(a: Array) -> Array:
    return np.asarray(np.floor(a.astype(F64) + 0.5))


for _dst in ("i32", "u32"):
    for _src in ("f32", "f64"):
        _to_integer(f"v_cvt_{_dst}_{_src}", _dst, _src, np.trunc)
    _to_integer(f"s_cvt_{_dst}_f32", _dst, "f32", np.trunc)
for _dst in ("i16", "u16"):
    _to_integer(f"v_cvt_{_dst}_f16", _dst, "f16", np.trunc)
_to_integer("v_cvt_rpi_i32_f32 v_cvt_nearest_i32_f32", "i32", "f32", _nearest_up)
_to_integer("v_cvt_flr_i32_f32 v_cvt_floor_i32_f32", "i32", "f32", np.floor)


# ---- from integers, between floats ----


def _cast(names: str, dst: str, src: str) -> None:
    dtype = {"f16": F16, "f32": F32, "f64": F64}[dst]

    @semantic(*names.split(), dst=dst, src=src)
    def convert(a: Array) -> Array:
        return np.asarray(a.astype(dtype))


for _src in ("i32", "u32"):
    _cast(f"v_cvt_f32_{_src} s_cvt_f32_{_src}", "f32", _src)
    _cast(f"v_cvt_f64_{_src}", "f64", _src)
for _src in ("i16", "u16"):
    _cast(f"v_cvt_f16_{_src}", "f16", _src)
_cast("v_cvt_f64_f32", "f64", "f32")
_cast("v_cvt_f32_f64", "f32", "f64")
_cast("v_cvt_f16_f32 s_cvt_f16_f32", "f16", "f32")
_cast("v_cvt_f32_f16 s_cvt_f32_f16", "f32", "f16")


def _byte_to_float(place: int) -> None:
    @semantic(f"v_cvt_f32_ubyte{place}", dst="f32", src="u32")
    def convert(a: Array) -> Array:
        return np.asarray((a >> U32(8 * place) & U32(0xFF)).astype(F32))


for _place in range(4):
    _byte_to_float(_place)


@semantic("v_cvt_off_f32_i4", dst="f32", src="u32")
def offset_to_float(a: Array) -> Array:
    """The low four bits, signed, in sixteenths."""
    return np.asarray(((((a & U32(15)) ^ U32(8)).astype(I32) - 8) / 16).astype(F32))


# ---- two at a time ----


def _pair(low: Array, high: Array) -> Array:
    """Two 16-bit results (in the low half of 32 bits each) in one register."""
    return np.asarray((low & U32(0xFFFF)) | (high << U32(16)))


@semantic("v_cvt_pkrtz_f16_f32", "v_cvt_pk_rtz_f16_f32", "s_cvt_pk_rtz_f16_f32", src="f32 f32")
def pack_halves_toward_zero(a: Array, b: Array) -> Array:
    return _pair(formats.toward_zero16(a), formats.toward_zero16(b))


@semantic("v_cvt_pk_f16_f32", src="f32 f32")
def pack_halves(a: Array, b: Array) -> Array:
    return _pair(formats.bits16(a), formats.bits16(b))


@semantic("v_cvt_pk_bf16_f32", src="f32 f32")
def pack_bfloats(a: Array, b: Array) -> Array:
    return _pair(formats.f32_to_bf16(a.view(U32)), formats.f32_to_bf16(b.view(U32)))


@semantic("v_cvt_f32_bf16", dst="f32", src="u16")
def from_bfloat(a: Array) -> Array:
    return formats.bf16_to_f32(a.astype(U32))


def _pack_integers(names: str, src: str, dtype: type, scale: float) -> None:
    @semantic(*names.split(), src=f"{src} {src}")
    def convert(a: Array, b: Array) -> Array:
        low, high = (_saturate(np.rint(part.astype(F64) * scale) if scale != 1 else part, dtype) for part in (a, b))
        return _pair(low.astype(U32), high.astype(U32))


_pack_integers("v_cvt_pk_i16_i32", "i32", I16, 1)
_pack_integers("v_cvt_pk_u16_u32", "u32", U16, 1)
_pack_integers("v_cvt_pk_i16_f32", "f32", I16, 1)
_pack_integers("v_cvt_pk_u16_f32", "f32", U16, 1)
_pack_integers("v_cvt_pknorm_i16_f32 v_cvt_pk_norm_i16_f32", "f32", I16, 32767)
_pack_integers("v_cvt_pknorm_u16_f32 v_cvt_pk_norm_u16_f32", "f32", U16, 65535)


@semantic("v_cvt_pk_u8_f32", src="f32 u32 u32")
def insert_byte(a: Array, place: Array, old: Array) -> Array:
    shift = (place & U32(3)) << U32(3)
    byte = _saturate(np.trunc(a), U8).astype(U32)
    return np.asarray((old & ~(U32(0xFF) << shift)) | (byte << shift))


# ---- 8-bit floats ----


def _decoder(instruction: Instruction, arch: Arch) -> tuple[Reader, formats.SmallFloat]:
    only(instruction, "byte_sel", "op_sel")
    name = "bf8" if "bf8" in instruction.name else "fp8"
    return read_bits(instruction, instruction.operand(1), 0, arch), formats.eight_bit(arch.name, name)


@builder("v_cvt_f32_fp8", "v_cvt_f32_bf8")
def from_eight_bits(instruction: Instruction, arch: Arch) -> Step:
    """One byte: the lowest, or the one that SDWA, byte_sel or op_sel (its bits reversed) picks."""
    read, small = _decoder(instruction, arch)
    write = write_bits(instruction, instruction.operand(0), arch)
    place = instruction.number("byte_sel")
    if "op_sel" in instruction.modifiers:
        place = selection(instruction, "op_sel", 0, 0) * 2 + selection(instruction, "op_sel", 1, 0)
    shift = U32(8 * place)
    return lambda w: write(w, small.decode((read(w) >> shift) & U32(0xFF)))


@builder("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8")
def from_eight_bits_twice(instruction: Instruction, arch: Arch) -> Step:
    """The two bytes of a half: the low one, or the one that SDWA, op_sel or ``.h`` picks."""
    read, small = _decoder(instruction, arch)
    plain = Instruction(**{**vars(instruction), "modifiers": {}, "encoding": ""})
    write = TYPES["pk_f32"].writer(plain, instruction.operand(0), arch)
    source = instruction.operand(1)
    shift = U32(16 if source.half == "h" or selection(instruction, "op_sel", 0, 0) else 0)

    def step(w: Waves) -> None:
        halves = read(w) >> shift
        write(w, small.decode(np.stack([halves & U32(0xFF), (halves >> U32(8)) & U32(0xFF)])))

    return step


def _field_writer(instruction: Instruction, arch: Arch, shift: int, bits: int) -> Callable[[Waves, Array], None]:
    """Writes some bits of the destination and keeps the others."""
    only(instruction, "byte_sel", "op_sel")
    operand = instruction.operand(0)
    if operand.kind != "v" or instruction.encoding not in ("", "e64", "e32"):
        raise UnknownInstruction(f"a result of this kind: {instruction.text}")
    write: Writer = write_bits(instruction, operand, arch)
    keep, index, places = U32(0xFFFFFFFF & ~(((1 << bits) - 1) << shift)), operand.index, U32(shift)
    return lambda w, value: write(w, (w.u32[index] & keep) | (value << places))


@builder("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32")
def to_eight_bits_twice(instruction: Instruction, arch: Arch) -> Step:
    small = formats.eight_bit(arch.name, "bf8" if "bf8" in instruction.name else "fp8")
    a, b = (TYPES["f32"].reader(instruction, instruction.operand(i + 1), i, arch) for i in range(2))
    high = selection(instruction, "op_sel", 2, 0) or instruction.operand(0).half == "h"
    write = _field_writer(instruction, arch, 16 if high else 0, 16)

    def step(w: Waves) -> None:
        low, upper = small.encode(a(w)).astype(U32), small.encode(b(w)).astype(U32)
        write(w, low | (upper << U32(8)))

    return step


@builder("v_cvt_sr_fp8_f32", "v_cvt_sr_bf8_f32")
def to_eight_bits_at_random(instruction: Instruction, arch: Arch) -> Step:
    small = formats.eight_bit(arch.name, "bf8" if "bf8" in instruction.name else "fp8")
    value = TYPES["f32"].reader(instruction, instruction.operand(1), 0, arch)
    random = TYPES["u32"].reader(instruction, instruction.operand(2), 1, arch)
    place = instruction.number("byte_sel")
    if "op_sel" in instruction.modifiers:
        place = selection(instruction, "op_sel", 2, 0) + 2 * selection(instruction, "op_sel", 3, 0)
    write = _field_writer(instruction, arch, 8 * place, 8)

    def step(w: Waves) -> None:
        write(w, small.encode_stochastic(value(w).view(U32), random(w)).astype(U32))

    return step


# ---- 8-bit floats with a scale (gfx950) ----


def _power(scale: Array) -> Array:
    """The power of two that is a float32's exponent field."""
    return np.asarray(np.ldexp(1.0, (scale.view(U32) >> U32(23) & U32(0xFF)).astype(I32) - 127))


@builder("v_cvt_scalef32_f32_fp8", "v_cvt_scalef32_f32_bf8", archs=("gfx950",))
def from_scaled(instruction: Instruction, arch: Arch) -> Step:
    small = formats.eight_bit(arch.name, "bf8" if "bf8" in instruction.name else "fp8")
    row = Semantic(
        instruction.name,
        None,
        lambda a, s: (small.decode(a) * _power(s)).astype(F32),
        None,
        ("f32",),
        ("byte_of", "f32"),
        1,
    )
    return step_of(row, instruction, arch)


@builder("v_cvt_scalef32_pk_fp8_f32", "v_cvt_scalef32_pk_bf8_f32", archs=("gfx950",))
def to_scaled(instruction: Instruction, arch: Arch) -> Step:
    small = formats.eight_bit(arch.name, "bf8" if "bf8" in instruction.name else "fp8")
    a, b, s = (TYPES["f32"].reader(instruction, instruction.operand(i + 1), i, arch) for i in range(3))
    write = _field_writer(instruction, arch, 16 if selection(instruction, "op_sel", 3, 0) else 0, 16)

    def step(w: Waves) -> None:
        power = _power(s(w))
        low, high = (small.encode((x(w) / power).astype(F32)).astype(U32) for x in (a, b))
        write(w, low | (high << U32(8)))

    return step

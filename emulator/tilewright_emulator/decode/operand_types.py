"""Operand types of 16 bits, of packed pairs and of mixed precision, for the tables of the other alu modules.

``u16`` ``i16`` ``f16``: half of a register: the low one, unless ``.h`` or op_sel says the high one. ``pk_u16``
``pk_i16`` ``pk_f16``: both halves, as an array with one more axis in front: (low result's source, high result's
source), as op_sel and op_sel_hi pick them. ``pk_f32`` ``pk_u32``: the same of a pair of registers. ``word``: one
register of a pair, as op_sel picks it. ``mix``: float32, or
a half widened to it (v_fma_mix). ``byte_of``: a 32-bit source of which an 8-bit part is picked by byte_sel.

A half that is written leaves the other half as it was, but for the older 16-bit instructions of gfx9, which clear it.
"""

from __future__ import annotations

import struct

import numpy as np

from tilewright_emulator.decode.operands import (
    MakeReader,
    MakeWriter,
    Reader,
    Writer,
    constant,
    read_bits,
    register_type,
    write_bits,
)
from tilewright_emulator.decode.operands import bits32 as constant_bits
from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, Operand
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.state.waves import Waves

U32, U16 = np.uint32, np.uint16
HALF = U32(16)
LOW = U32(0xFFFF)

# 16-bit instructions of gfx9 that keep the other half; the others of gfx9 clear it.
KEEPS_HIGH = {
    "v_fmac_f16", "v_fma_f16", "v_fmamk_f16", "v_fmaak_f16", "v_mad_u16", "v_mad_i16", "v_div_fixup_f16", "v_add_i16",
    "v_sub_i16", "v_min3_f16", "v_max3_f16", "v_med3_f16", "v_min3_i16", "v_max3_i16", "v_med3_i16", "v_min3_u16",
    "v_max3_u16", "v_med3_u16", "v_fma_mixlo_f16", "v_fma_mixhi_f16", "v_cvt_scalef32_f16_fp8",
}  # fmt: skip


def selection(instruction: Instruction, name: str, position: int, default: int) -> int:
    """One element of a modifier like ``op_sel:[0,1,0]``."""
    text = instruction.modifiers.get(name)
    if text is None:
        return default
    elements = [int(part) for part in text.strip("[]").split(",")]
    return elements[position] if position < len(elements) else default


def source_count(instruction: Instruction) -> int:
    """Printed sources of an instruction with one destination."""
    return len(instruction.operands) - 1


def writes_high(instruction: Instruction, operand: Operand) -> bool:
    """A 16-bit result goes to the high half."""
    return operand.half == "h" or bool(selection(instruction, "op_sel", source_count(instruction), 0))


def constant16(operand: Operand) -> int:
    """A constant as a 16-bit operation sees it, sign extended to 32 bits if it is an integer."""
    if isinstance(operand.value, float):
        return int(struct.unpack("<H", struct.pack("<e", operand.value))[0])
    return operand.value & 0xFFFFFFFF


# ---- halves ----


def half_bits(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
    """uint16 lanes of a half, without neg and abs."""
    if operand.kind == "constant":
        return constant(np.array([[constant16(operand) & 0xFFFF]], U16))
    read = read_bits(instruction, operand, source, arch)
    if source < 0:
        high = writes_high(instruction, operand)
    else:
        high = operand.half == "h" or bool(selection(instruction, "op_sel", source, 0))
    if high:
        return lambda w: (read(w) >> HALF).astype(U16)
    return lambda w: read(w).astype(U16)


def _read_half(dtype: type) -> MakeReader:
    def make(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
        bits = half_bits(instruction, operand, source, arch)
        keep = U16(0x7FFF if operand.absolute else 0xFFFF)
        flip = U16(0x8000 if operand.negative else 0)
        if operand.absolute or operand.negative:
            if dtype is not np.float16:
                raise UnknownInstruction(f"neg or abs of an integer: {instruction.text}")
            return lambda w: ((bits(w) & keep) ^ flip).view(dtype)
        return lambda w: bits(w).view(dtype)

    return make


def write_half(instruction: Instruction, operand: Operand, arch: Arch) -> Writer:
    """Writes 16-bit values of any dtype."""
    write = write_bits(instruction, operand, arch)
    index = operand.index
    if operand.kind == "s" or instruction.encoding == "sdwa":
        return lambda w, value: write(w, value.view(U16).astype(U32))
    if writes_high(instruction, operand):
        return lambda w, value: write(w, (w.u32[index] & LOW) | (value.view(U16).astype(U32) << HALF))
    if arch.is_cdna and instruction.name not in KEEPS_HIGH:
        return lambda w, value: write(w, value.view(U16).astype(U32))
    return lambda w, value: write(w, (w.u32[index] & ~LOW) | value.view(U16).astype(U32))


# ---- packed pairs ----


def _signs(instruction: Instruction, source: int, operand: Operand, sign: int) -> tuple[int, int]:
    """Bits to flip in the low and in the high element."""
    both = sign if operand.negative else 0
    low = sign if selection(instruction, "neg_lo", source, 0) else 0
    high = sign if selection(instruction, "neg_hi", source, 0) else 0
    return low ^ both, high ^ both


def pair_of_halves(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
    """uint16 ``(2, waves, lanes)``, with op_sel, op_sel_hi, neg_lo and neg_hi done."""
    if operand.absolute:
        raise UnknownInstruction(f"abs of a packed operand: {instruction.text}")
    if operand.kind == "constant":
        read = constant(np.array([[constant16(operand)]], U32))
    else:
        read = read_bits(instruction, operand, source, arch)
    picks = (
        (0, 1)
        if source < 0
        else tuple(selection(instruction, f"op_sel{s}", source, d) for s, d in (("", 0), ("_hi", 1)))
    )
    shifts = np.array(picks, U32).reshape(2, 1, 1) * HALF
    low, high = (0, 0) if source < 0 else _signs(instruction, source, operand, 0x8000)
    flips = np.array([low, high], U16).reshape(2, 1, 1)
    if flips.any():
        return lambda w: (read(w) >> shifts).astype(U16) ^ flips
    return lambda w: (read(w) >> shifts).astype(U16)


def _read_pair16(dtype: type) -> MakeReader:
    def make(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
        bits = pair_of_halves(instruction, operand, source, arch)
        return lambda w: bits(w).view(dtype)

    return make


def _write_pair16(instruction: Instruction, operand: Operand, arch: Arch) -> Writer:
    write = write_bits(instruction, operand, arch)

    def put(w: Waves, value: Array) -> None:
        halves = value.view(U16).astype(U32)
        write(w, halves[0] | (halves[1] << HALF))

    return put


def _words(instruction: Instruction, operand: Operand, arch: Arch) -> tuple[Reader, Reader]:
    """The two registers of a pair as uint32 lanes."""
    if operand.kind == "constant":
        low = constant(np.array([[constant_bits(operand)]], U32))
        return low, constant(np.zeros((1, 1), U32))
    index = operand.index
    if operand.kind == "v":
        return (lambda w: w.u32[index]), (lambda w: w.u32[index + 1])
    if operand.kind == "s":
        return (lambda w: w.s_u32[index]), (lambda w: w.s_u32[index + 1])
    raise UnknownInstruction(f"operand {operand.text}: {instruction.text}")


def _read_pair32(dtype: type) -> MakeReader:
    def make(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
        words = _words(instruction, operand, arch)
        first = words[0 if source < 0 else selection(instruction, "op_sel", source, 0)]
        second = words[1 if source < 0 else selection(instruction, "op_sel_hi", source, 1)]
        low, high = (0, 0) if source < 0 else _signs(instruction, source, operand, 0x80000000)
        flips = np.array([low, high], U32).reshape(2, 1, 1)
        if low or high:
            return lambda w: (np.stack([first(w), second(w)]) ^ flips).view(dtype)
        return lambda w: np.stack([first(w), second(w)]).view(dtype)

    return make


def _write_pair32(instruction: Instruction, operand: Operand, arch: Arch) -> Writer:
    index = operand.index
    if operand.kind != "v":
        raise UnknownInstruction(f"a packed result in {operand.text}: {instruction.text}")

    def put(w: Waves, value: Array) -> None:
        target = w.vectors[index : index + 2]
        if w.full:
            target[...] = value.view(U32)
        else:
            np.copyto(target, value.view(U32), where=w.exec)

    return put


def read_word(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
    """uint32 lanes: the register of a pair that op_sel picks for this source."""
    return _words(instruction, operand, arch)[selection(instruction, "op_sel", source, 0)]


# ---- mixed precision ----


def read_mixed(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
    """float32: the register itself, or the half that op_sel picks if op_sel_hi marks the source as a half."""
    negative, absolute = operand.negative, operand.absolute
    half = bool(selection(instruction, "op_sel_hi", source, 0))
    if half:
        bits16 = half_bits(instruction, operand, source, arch)
        value: Reader = lambda w: bits16(w).view(np.float16).astype(np.float32)  # noqa: E731
    else:
        bits = read_bits(instruction, operand, source, arch)
        value = lambda w: bits(w).view(np.float32)  # noqa: E731
    if absolute and negative:
        return lambda w: -np.abs(value(w))
    if absolute:
        return lambda w: np.abs(value(w))
    if negative:
        return lambda w: -value(w)
    return value


# ---- bytes ----


def read_byte(instruction: Instruction, operand: Operand, source: int, arch: Arch) -> Reader:
    """uint8 lanes: the byte that byte_sel picks (SDWA picks in its own way; op_sel picks as gfx950 prints it)."""
    read = read_bits(instruction, operand, source, arch)
    position = instruction.number("byte_sel")
    if "op_sel" in instruction.modifiers:
        position = 2 * selection(instruction, "op_sel", 0, 0) + selection(instruction, "op_sel", 1, 0)
    shift = U32(8 * position)
    return lambda w: (read(w) >> shift).astype(np.uint8)


def _no_writer(instruction: Instruction, operand: Operand, arch: Arch) -> Writer:
    raise UnknownInstruction(f"a result of this type: {instruction.text}")


NO_WRITER: MakeWriter = _no_writer

for _name, _dtype in (("u16", np.uint16), ("i16", np.int16), ("f16", np.float16)):
    register_type(_name, _read_half(_dtype), write_half)
    register_type(f"pk_{_name}", _read_pair16(_dtype), _write_pair16)
for _name, _wide in (("u32", np.uint32), ("f32", np.float32)):
    register_type(f"pk_{_name}", _read_pair32(_wide), _write_pair32)
register_type("word", read_word, NO_WRITER)
register_type("mix", read_mixed, NO_WRITER)
register_type("byte_of", read_byte, NO_WRITER)

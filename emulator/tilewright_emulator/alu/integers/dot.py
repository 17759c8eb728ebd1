"""Dot products of packed integers, added to a 32-bit sum (exact; clamp saturates the end result)."""

from __future__ import annotations

import numpy as np

from tilewright_emulator.decode.modifiers import only
from tilewright_emulator.decode.operand_types import selection
from tilewright_emulator.decode.operands import read_bits, write_bits
from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.state.waves import Waves

I32, U32, I64 = np.int32, np.uint32, np.int64


def split(values: Array, bits: int, signed: bool) -> Array:
    """The parts of 32-bit values, lowest first, along a new last axis, as int64."""
    parts = np.arange(0, 32, bits)
    unsigned = (values[..., None].astype(I64) >> parts) & ((1 << bits) - 1)
    return np.asarray(unsigned - ((unsigned >> (bits - 1)) << bits) if signed else unsigned)


def _dot(instruction: Instruction, arch: Arch, bits: int, signed: tuple[bool, bool], unsigned_sum: bool) -> Step:
    only(instruction, "clamp", *(("neg_lo",) if "_iu" in instruction.name else ()))
    accumulate = "c_" in instruction.name
    a, b = (read_bits(instruction, instruction.operand(i), i - 1, arch) for i in (1, 2))
    c = read_bits(instruction, instruction.operand(0 if accumulate else 3), -1 if accumulate else 2, arch)
    write = write_bits(instruction, instruction.operand(0), arch)
    clamp = "clamp" in instruction.modifiers
    limits = (0, 0xFFFFFFFF) if unsigned_sum else (-0x80000000, 0x7FFFFFFF)

    def step(w: Waves) -> None:
        products = split(a(w), bits, signed[0]) * split(b(w), bits, signed[1])
        start = c(w) if unsigned_sum else c(w).view(I32)
        total = products.sum(axis=-1) + start
        if clamp:
            total = np.clip(total, *limits)
        write(w, (total & 0xFFFFFFFF).astype(U32))

    return step


@builder("v_dot4_i32_i8", "v_dot4c_i32_i8", "v_dot8_i32_i4", "v_dot8c_i32_i4", "v_dot2_i32_i16", "v_dot2c_i32_i16")
def dot_signed(instruction: Instruction, arch: Arch) -> Step:
    return _dot(instruction, arch, 32 // int(instruction.name[5]), (True, True), False)


@builder("v_dot4_u32_u8", "v_dot8_u32_u4", "v_dot2_u32_u16")
def dot_unsigned(instruction: Instruction, arch: Arch) -> Step:
    return _dot(instruction, arch, 32 // int(instruction.name[5]), (False, False), True)


@builder("v_dot4_i32_iu8", "v_dot8_i32_iu4")
def dot_either(instruction: Instruction, arch: Arch) -> Step:
    """neg_lo says for each of the two sources whether it is signed."""
    first, second = (bool(selection(instruction, "neg_lo", i, 0)) for i in range(2))
    return _dot(instruction, arch, 32 // int(instruction.name[5]), (first, second), False)

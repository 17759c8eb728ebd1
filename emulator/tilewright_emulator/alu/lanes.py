"""Instructions of the vector unit that move values between lanes, or between a lane and the scalar unit."""

from __future__ import annotations

import numpy as np

from tilewright_emulator.decode.modifiers import only
from tilewright_emulator.decode.operand_types import selection
from tilewright_emulator.decode.operands import read_bits, write_bits
from tilewright_emulator.decode.registry import Step, builder
from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.state.waves import Waves

U32 = np.uint32


def _all_lanes(w: Waves, values: Array) -> Array:
    return np.broadcast_to(values, w.exec.shape)


# ---- one lane ----


@builder("v_readfirstlane_b32")
def read_first_lane(instruction: Instruction, arch: Arch) -> Step:
    only(instruction)
    read = read_bits(instruction, instruction.operand(1), 0, arch)
    write = write_bits(instruction, instruction.operand(0), arch)

    def step(w: Waves) -> None:
        values = read(w)
        if w.full:
            write(w, values[:, :1])
            return
        first = np.argmax(w.exec, axis=1)[:, None]  # lane 0 if no lane is active
        write(w, np.take_along_axis(_all_lanes(w, values), first, axis=1))

    return step


@builder("v_readlane_b32")
def read_lane(instruction: Instruction, arch: Arch) -> Step:
    """Any lane, active or not."""
    only(instruction)
    read = read_bits(instruction, instruction.operand(1), 0, arch)
    place = read_bits(instruction, instruction.operand(2), 1, arch)
    write = write_bits(instruction, instruction.operand(0), arch)

    def step(w: Waves) -> None:
        lane = np.broadcast_to(place(w) & U32(arch.lanes - 1), (w.count, 1)).astype(np.int64)
        write(w, np.take_along_axis(_all_lanes(w, read(w)), lane, axis=1))

    return step


@builder("v_writelane_b32")
def write_lane(instruction: Instruction, arch: Arch) -> Step:
    """Any lane, active or not."""
    only(instruction)
    value = read_bits(instruction, instruction.operand(1), 0, arch)
    place = read_bits(instruction, instruction.operand(2), 1, arch)
    index = instruction.operand(0).index

    def step(w: Waves) -> None:
        lane = np.broadcast_to(place(w) & U32(arch.lanes - 1), (w.count, 1)).astype(np.int64)
        np.put_along_axis(w.u32[index], lane, np.broadcast_to(value(w), (w.count, 1)), axis=1)

    return step


# ---- how many lanes below this one ----


@builder("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def masked_count(instruction: Instruction, arch: Arch) -> Step:
    only(instruction)
    mask = read_bits(instruction, instruction.operand(1), 0, arch)
    start = read_bits(instruction, instruction.operand(2), 1, arch)
    write = write_bits(instruction, instruction.operand(0), arch)
    first = 32 if instruction.name.startswith("v_mbcnt_hi") else 0
    below = np.array([(1 << min(max(lane - first, 0), 32)) - 1 for lane in range(arch.lanes)], U32)
    return lambda w: write(w, np.bitwise_count(mask(w) & below).astype(U32) + start(w))


# ---- rows of 16 lanes ----


@builder("v_permlane16_b32", "v_permlanex16_b32")
def permute_row(instruction: Instruction, arch: Arch) -> Step:
    """Each lane picks a lane of its row, or of the other row of its 32, by a nibble of the two scalar sources.

    A lane whose source is not active keeps its value; op_sel[0] reads the source all the same, op_sel[1] gives zero.
    """
    only(instruction, "op_sel")
    read = read_bits(instruction, instruction.operand(1), 0, arch)
    low = read_bits(instruction, instruction.operand(2), 1, arch)
    high = read_bits(instruction, instruction.operand(3), 2, arch)
    target = instruction.operand(0).index
    lane = np.arange(arch.lanes)
    row = (lane & ~15) ^ (16 if "x16" in instruction.name else 0)
    shift = ((lane & 7) * 4).astype(U32)
    upper = (lane & 8) != 0
    fetch_inactive, zero = selection(instruction, "op_sel", 0, 0), selection(instruction, "op_sel", 1, 0)

    def step(w: Waves) -> None:
        nibble = (np.where(upper, high(w), low(w)) >> shift) & U32(15)
        source = np.broadcast_to(row + nibble.astype(np.int64), w.exec.shape)
        value = np.take_along_axis(_all_lanes(w, read(w)), source, axis=1)
        lanes = w.exec
        if not (w.full or fetch_inactive):
            valid = np.take_along_axis(w.exec, source, axis=1)
            value = np.where(valid, value, U32(0))
            lanes = lanes if zero else lanes & valid
        np.copyto(w.u32[target], value, where=lanes)

    return step


@builder("v_permlane64_b32")
def swap_halves(instruction: Instruction, arch: Arch) -> Step:
    """The other half of a wave of 64; a copy in a wave of 32."""
    only(instruction)
    read = read_bits(instruction, instruction.operand(1), 0, arch)
    write = write_bits(instruction, instruction.operand(0), arch)
    lane = np.arange(arch.lanes) ^ (32 if arch.lanes == 64 else 0)
    return lambda w: write(w, _all_lanes(w, read(w))[:, lane])


@builder("v_permlane16_swap_b32", "v_permlane32_swap_b32", written=2, archs=("gfx950",))
def swap_rows(instruction: Instruction, arch: Arch) -> Step:
    """The odd rows (of 16 or 32 lanes) of the first register change places with the even rows of the second."""
    only(instruction)
    first, second = instruction.operand(0), instruction.operand(1)
    if first.kind != "v" or second.kind != "v":
        raise UnknownInstruction(f"operands: {instruction.text}")
    size = 16 if "16" in instruction.name else 32
    lane = np.arange(arch.lanes)
    odd = (lane // size) % 2 == 1
    one, two = first.index, second.index

    def step(w: Waves) -> None:
        a, b = w.u32[one].copy(), w.u32[two].copy()
        np.copyto(w.u32[one], b[:, lane ^ size], where=w.exec & odd)
        np.copyto(w.u32[two], a[:, lane ^ size], where=w.exec & ~odd)

    return step

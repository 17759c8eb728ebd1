"""Modifiers of vector instructions: DPP, SDWA, clamp and omod.

The three functions here are called once for every operand (or instruction) when a program is decoded; what they return
runs with it. ``None`` and the function itself mean: nothing to do, which keeps the common case fast.

DPP: lane i of source 0 comes from another lane of its row of 16. A lane whose source lies outside the row, or is not
active, is not written, or gets zero if ``bound_ctrl`` is set. row_mask and bank_mask say which rows of 16 lanes and
which fours of every row are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, Operand
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.state.waves import Waves

U32 = np.uint32
FIELDS = {
    "DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16), "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
}  # fmt: skip
FLOATS = ("f16", "f32", "f64", "pk_f16", "pk_f32")

# Integer instructions whose clamp saturates: name -> the function to use instead. Filled by the modules of integers.
SATURATING: dict[str, Callable[..., Any]] = {}
# Conversions to integers, which saturate with or without clamp.
CLAMP_CHANGES_NOTHING = {"v_cvt_i32_f32", "v_cvt_u32_f32", "v_cvt_i32_f64", "v_cvt_u32_f64"}


# ---- DPP ----


def _list(text: str) -> list[int]:
    return [int(part) for part in text.strip("[]").split(",")]


def dpp_sources(instruction: Instruction, lanes: int) -> tuple[Array, Array]:
    """For each lane the lane that it reads, and whether that one exists. Raises ``UnknownInstruction``."""
    lane = np.arange(lanes)
    row, place = lane & ~15, lane & 15
    modifiers = instruction.modifiers
    everywhere = np.ones(lanes, bool)
    if "quad_perm" in modifiers:
        return (lane & ~3) + np.array(_list(modifiers["quad_perm"]))[lane & 3], everywhere
    if "dpp8" in modifiers:
        return (lane & ~7) + np.array(_list(modifiers["dpp8"]))[lane & 7], everywhere
    if "row_mirror" in modifiers:
        return row + 15 - place, everywhere
    if "row_half_mirror" in modifiers:
        return (lane & ~7) + 7 - (lane & 7), everywhere
    if "row_newbcast" in modifiers or "row_share" in modifiers:
        return row + instruction.number("row_newbcast", instruction.number("row_share")), everywhere
    if "row_xmask" in modifiers:
        return row + (place ^ instruction.number("row_xmask")), everywhere
    if "row_ror" in modifiers:
        return row + ((place - instruction.number("row_ror")) & 15), everywhere
    return _shifts(instruction, lane, lanes)


def _shifts(instruction: Instruction, lane: Array, lanes: int) -> tuple[Array, Array]:
    place, modifiers = lane & 15, instruction.modifiers
    if "row_shl" in modifiers:
        step = instruction.number("row_shl")
        return (lane + step) % lanes, place + step < 16
    if "row_shr" in modifiers:
        step = instruction.number("row_shr")
        return (lane - step) % lanes, place >= step
    if "row_bcast" in modifiers:  # the last lane of a row (of a half) to all of the next
        if instruction.number("row_bcast") == 15:
            return ((lane & ~15) - 1) % lanes, lane >= 16
        return np.full(lanes, 31), lane >= 32
    if "wave_shl" in modifiers:
        return (lane + 1) % lanes, lane + 1 < lanes
    if "wave_shr" in modifiers:
        return (lane - 1) % lanes, lane >= 1
    if "wave_rol" in modifiers:
        return (lane + 1) % lanes, np.ones(lanes, bool)
    if "wave_ror" in modifiers:
        return (lane - 1) % lanes, np.ones(lanes, bool)
    raise UnknownInstruction(f"no DPP control that the emulator knows: {instruction.text}")


def _is_dpp(instruction: Instruction) -> bool:
    return instruction.encoding in ("dpp", "e64_dpp")


def _dpp_valid(instruction: Instruction, lanes: int) -> Callable[[Waves], Array]:
    """Which lanes have a source: it exists and is active (or may be read all the same, ``fi``)."""
    source, exists = dpp_sources(instruction, lanes)
    if instruction.number("fi"):
        return lambda w: exists[None, :]
    return lambda w: exists & w.exec[:, source]


def _dpp_source(instruction: Instruction, arch: Arch) -> Callable[[Waves, Array], Array]:
    source, _ = dpp_sources(instruction, arch.lanes)
    valid = _dpp_valid(instruction, arch.lanes)

    def change(w: Waves, bits: Array) -> Array:
        return np.where(valid(w), np.broadcast_to(bits, w.exec.shape)[:, source], U32(0))

    return change


def _dpp_result(instruction: Instruction, arch: Arch) -> Callable[[Waves, Array], tuple[Array, Array]]:
    lane = np.arange(arch.lanes)
    rows, banks = instruction.number("row_mask", 15), instruction.number("bank_mask", 15)
    mask = (rows >> (lane // 16) & 1).astype(bool) & (banks >> (lane % 16 // 4) & 1).astype(bool)
    valid = _dpp_valid(instruction, arch.lanes)
    if instruction.number("bound_ctrl") or "dpp8" in instruction.modifiers:
        return lambda w, value: (value, w.exec & mask)
    return lambda w, value: (value, w.exec & mask & valid(w))


# ---- SDWA ----


def _field(instruction: Instruction, name: str) -> tuple[int, int]:
    return FIELDS[instruction.modifiers.get(name, "DWORD")]


def _sdwa_source(instruction: Instruction, operand: Operand, source: int) -> Callable[[Waves, Array], Array] | None:
    first, width = _field(instruction, f"src{source}_sel")
    if width == 32:
        return None
    if operand.extend:
        left, right = U32(32 - first - width), np.int32(32 - width)
        return lambda w, bits: ((bits << left).view(np.int32) >> right).view(U32)
    shift, mask = U32(first), U32((1 << width) - 1)
    return lambda w, bits: (bits >> shift) & mask


def _sdwa_result(instruction: Instruction, operand: Operand) -> Callable[[Waves, Array], tuple[Array, Array]] | None:
    first, width = _field(instruction, "dst_sel")
    if width == 32:
        return None
    shift, mask, index = U32(first), U32((1 << width) - 1), operand.index
    unused = instruction.modifiers.get("dst_unused", "UNUSED_PAD")
    rest = U32(0xFFFFFFFF & ~(((1 << width) - 1) << first))
    if unused == "UNUSED_PAD":
        return lambda w, value: ((value.view(U32) & mask) << shift, w.exec)
    if unused == "UNUSED_PRESERVE":
        return lambda w, value: (((value.view(U32) & mask) << shift) | (w.u32[index] & rest), w.exec)
    raise UnknownInstruction(f"dst_unused:{unused}: {instruction.text}")


# ---- what the operand readers and writers ask ----


def source_lanes(
    instruction: Instruction, operand: Operand, source: int, arch: Arch
) -> Callable[[Waves, Array], Array] | None:
    """Change of the raw 32-bit lanes of printed source ``source`` (-1: the destination's old value)."""
    if _is_dpp(instruction) and source == 0:
        return _dpp_source(instruction, arch)
    if instruction.encoding == "sdwa" and source >= 0:
        return _sdwa_source(instruction, operand, source)
    return None


def result_lanes(
    instruction: Instruction, operand: Operand, arch: Arch
) -> Callable[[Waves, Array], tuple[Array, Array]] | None:
    """Change of a 32-bit result: ``change(waves, value)`` gives the value and the lanes (bool) to write."""
    if _is_dpp(instruction):
        return _dpp_result(instruction, arch)
    if instruction.encoding == "sdwa":
        return _sdwa_result(instruction, operand)
    return None


# Modifiers that may follow the operands, by the operands to which they apply.
DPP = frozenset(
    {
        "quad_perm", "dpp8", "row_mirror", "row_half_mirror", "row_newbcast", "row_share", "row_xmask", "row_ror",
        "row_shl", "row_shr", "row_bcast", "wave_shl", "wave_shr", "wave_rol", "wave_ror", "row_mask", "bank_mask",
        "bound_ctrl", "fi",
    }
)  # fmt: skip
SDWA = frozenset({"dst_sel", "dst_unused", "src0_sel", "src1_sel"})
HALVES = ("u16", "i16", "f16", "word", "mix", "byte_of")
PAIRS = ("pk_u16", "pk_i16", "pk_f16", "pk_u32", "pk_f32", "mix")


def check_modifiers(instruction: Instruction, kinds: tuple[str, ...]) -> None:
    """Raises ``UnknownInstruction`` for a modifier that operands of these types do not heed."""
    plain = [kind.removeprefix("dst:") for kind in kinds]
    known = ["clamp", "mul", "div"]
    if any(kind in HALVES or kind in PAIRS for kind in plain):
        known.append("op_sel")
    if any(kind in PAIRS for kind in plain):
        known += ["op_sel_hi", "neg_lo", "neg_hi"]
    if "byte_of" in plain:
        known.append("byte_sel")
    only(instruction, *known)


def only(instruction: Instruction, *known: str) -> None:
    """Raises ``UnknownInstruction`` for other modifiers than these, and DPP's and SDWA's in their encodings."""
    encoded = DPP if _is_dpp(instruction) else SDWA if instruction.encoding == "sdwa" else frozenset()
    if strange := set(instruction.modifiers) - encoded - set(known):
        raise UnknownInstruction(f"modifier {', '.join(sorted(strange))}: {instruction.text}")


def _between_zero_and_one(value: Array) -> Array:
    """A NaN gives zero, as DX10_CLAMP (which compute kernels have set) says."""
    zero, one = value.dtype.type(0), value.dtype.type(1)
    return np.asarray(np.fmin(np.fmax(value, zero), one))


def wrap_function(
    function: Callable[..., Any], instruction: Instruction, dst: tuple[str, ...], arch: Arch
) -> Callable[..., Any]:
    """Clamp and omod, which apply to the result's value before it is written."""
    modifiers = instruction.modifiers
    clamp = "clamp" in modifiers
    factor = float(modifiers.get("mul", 1)) / float(modifiers.get("div", 1))
    if not clamp and factor == 1:
        return function
    if dst[0] not in FLOATS:
        if instruction.name in CLAMP_CHANGES_NOTHING and factor == 1:
            return function
        if instruction.name in SATURATING and factor == 1:
            return SATURATING[instruction.name]
        raise UnknownInstruction(f"clamp or omod of this instruction: {instruction.text}")

    def changed(*sources: Array) -> Array:
        value = function(*sources)
        if factor != 1:
            value = value * value.dtype.type(factor)
        return _between_zero_and_one(value) if clamp else value

    return changed

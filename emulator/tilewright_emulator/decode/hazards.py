"""Wait states that CDNA GPUs leave to the program, and that no compiler inserts around inline assembly.

Source: "AMD Instinct MI300 Instruction Set Architecture", section Manually Inserted Wait States (NOPs). An instruction
is one wait state, ``s_nop N`` is N + 1. Looked at are the instructions ahead of one in the program, up to the nearest
branch or branch target. RDNA GPUs wait by themselves for all of this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tilewright_emulator.decode.registry import find
from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, Operand, register_bits
from tilewright_emulator.isa.registers import M0

__all__ = ["hazard_of"]

_MEMORY = ("buffer_", "global_", "flat_", "scratch_")
_SCALARS = ~((1 << 512) - 1)
_M0_BIT = 1 << 512 + M0
_MATRIX = re.compile(r"v_s?mfma(?:c_scale|c|_scale)?_\w+?_(\d+)x\d+x")
# Passes of the quickest instruction of a shape, and two: what holds for all of that shape, whatever their types.
_MATRIX_STATES = {4: 4, 16: 6, 32: 10}
_FURTHEST = 10


@dataclass(frozen=True)
class _Rule:
    """``states`` must lie between a writer and an instruction that reads what it wrote."""

    states: int
    text: str
    writes: Callable[[Instruction], bool]
    reads: Callable[[Instruction], bool]
    registers: int


def _is_vector(item: Instruction) -> bool:
    return item.name.startswith("v_") and not _MATRIX.match(item.name)


def _is_memory(item: Instruction) -> bool:
    return item.name.startswith(_MEMORY)


_RULES = (
    _Rule(
        1,
        "m0 is written by a scalar instruction, and a load straight into LDS takes its place from it",
        lambda item: item.name.startswith("s_"),
        lambda item: _is_memory(item) and ("lds" in item.modifiers or "_lds_" in item.name),
        _M0_BIT,
    ),
    _Rule(
        5,
        "a scalar register is written by a vector instruction, and an access to memory reads it",
        _is_vector,
        _is_memory,
        _SCALARS,
    ),
    _Rule(
        4,
        "a scalar register is written by a vector instruction, and selects a lane",
        _is_vector,
        lambda item: item.name in ("v_readlane_b32", "v_writelane_b32"),
        _SCALARS,
    ),
    _Rule(
        2,
        "a vector register is written by a vector instruction, and read across lanes (DPP)",
        _is_vector,
        lambda item: "dpp" in item.encoding,
        (1 << 512) - 1,
    ),
)


def hazard_of(instructions: Sequence[Instruction], at: int, targets: Collection[int], arch: Arch) -> str:
    """Wait states that an instruction lacks, in words; empty if it lacks none. ``targets``: addresses that branches go
    to."""
    item = instructions[at]
    if not arch.is_cdna or not item.name.startswith(("v_", "ds_", *_MEMORY)):
        return ""
    rules = [rule for rule in _RULES if rule.reads(item)]
    read = _read(item, arch)
    states = 0
    for place in range(at - 1, -1, -1):
        if instructions[place + 1].address in targets:
            return ""
        earlier = instructions[place]
        if earlier.target is not None or earlier.name.startswith(("s_setpc", "s_swappc", "s_endpgm", "s_barrier")):
            return ""
        written = _written(earlier, arch)
        for rule in rules:
            if states < rule.states and rule.writes(earlier) and written & _subject(item, read, rule):
                return f"{rule.text}: {states} wait states lie between, {rule.states} must"
        if match := _MATRIX.match(earlier.name):
            least = _MATRIX_STATES.get(int(match[1]), 0)
            if states < least and not _MATRIX.match(item.name) and written & read:
                return f"{earlier.name} writes what is read: {states} wait states lie between, {least} must at least"
        states += int(earlier.operands[0], 0) + 1 if earlier.name == "s_nop" else 1
        if states >= _FURTHEST:
            return ""
    return ""


def _subject(item: Instruction, read: int, rule: _Rule) -> int:
    """Registers that an instruction reads in the sense of a rule."""
    if rule.registers == _M0_BIT:
        return _M0_BIT
    if item.name in ("v_readlane_b32", "v_writelane_b32") and rule.states == 4:
        return _bits(item.operands[2:3])
    if rule.states == 2:
        return _bits(item.operands[1:2])
    return read & rule.registers


def _split(item: Instruction, arch: Arch) -> int:
    """Printed operands that are destinations."""
    try:
        return find(item, arch).written
    except UnknownInstruction:
        return 1


def _bits(operands: Sequence[str]) -> int:
    found = 0
    for text in operands:
        found |= _bits_of(text)
    return found


def _bits_of(text: str) -> int:
    try:
        return register_bits(Operand.parse(text))
    except ValueError:  # a word
        return 0


def _memory_written(item: Instruction) -> int:
    return 0 if "_store_" in item.name or "_atomic_" in item.name or "lds" in item.modifiers else 1


def _written(item: Instruction, arch: Arch) -> int:
    count = _memory_written(item) if _is_memory(item) else _split(item, arch)
    return _bits(item.operands[:count])


def _read(item: Instruction, arch: Arch) -> int:
    count = _memory_written(item) if _is_memory(item) else _split(item, arch)
    return _bits(item.operands[count:])

"""A function of a code object, decoded: steps, and which registers each touches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tilewright_emulator.decode.hazards import hazard_of
from tilewright_emulator.decode.operand_types import selection
from tilewright_emulator.decode.registry import Step, find
from tilewright_emulator.decode.steps import make_step
from tilewright_emulator.errors import MissingNop, MissingWait, UninitialisedRegister, UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction, Operand, register_bits
from tilewright_emulator.isa.registers import ACCUMULATORS
from tilewright_emulator.state.waves import Waves

CALLS = ("s_swappc_b64", "s_call_b64", "s_setpc_b64")
FAMILIES = ("ds_", "global_", "buffer_", "flat_", "scratch_")
PLACED = ("s_getpc_b64", *CALLS)  # what they do depends on where they stand
EVERY_REGISTER = -1
VECTORS = re.compile(r"\b([va])\[?(?:\d+:)?(\d+)")
KEPT = 1 << 16
# Kernels of one arch have half of their instructions in common.
_MEANINGS: dict[tuple[str, str], tuple[Step, Touched] | str] = {}


@dataclass(frozen=True)
class Copied:
    """One copy: an undefined register stays undefined in its new place, and whoever uses it there is told.

    ``kind``: "pair" (a pair of vector registers), "out" (a scalar register to a lane of a vector register, as compilers
    spill them) and "back". ``source``, ``target``: bits of registers; ``lane``: -1 if it is not a constant.
    """

    kind: Literal["pair", "out", "back"]
    source: tuple[int, ...]
    target: tuple[int, ...]
    lane: int = -1


@dataclass(frozen=True)
class Touched:
    """Registers that an instruction reads and writes, as bits (``register_bits``); its memory unit's prefix.

    ``high_reads``, ``high_writes``: those that are the upper half of a pair of the vector unit. Compilers leave upper
    halves undefined where only the lower ones matter: they stay so, instead of being refused. ``copy``: what a copy
    moves, undefined or not.
    """

    reads: int
    writes: int
    family: str
    high_reads: int = 0
    high_writes: int = 0
    copy: Copied | None = None


def touched(instruction: Instruction, arch: Arch) -> Touched:
    """From the printed operands: the destinations come first."""
    row = find(instruction, arch)
    printed = _operands(instruction)
    written = row.written
    if "_atomic_" in instruction.name:
        modifiers = instruction.modifiers
        written = int("glc" in modifiers or "sc0" in modifiers or "RETURN" in modifiers.get("th", ""))
    if "lds" in instruction.modifiers:
        written = 0
    reads = writes = high_reads = high_writes = 0
    arithmetic = instruction.name.startswith("v_") and instruction.name[2:6] not in ("mfma", "wmma")
    for at, operand in enumerate(printed):
        halved = operand.kind == "v" or (operand.kind == "s" and instruction.name == "v_mov_b64")
        high = register_bits(operand, 1, 1) if arithmetic and halved and operand.count == 2 else 0
        if at < written:
            writes, high_writes = writes | register_bits(operand), high_writes | high
        else:
            count = None if _whole(instruction, at - written, operand) else 1
            reads, high_reads = reads | register_bits(operand, 0, count), high_reads | high
    if _merges_masks(instruction):
        reads = high_reads = 0
    if any(kind.startswith("dst:") for kind in row.src):
        reads |= register_bits(printed[0])
    if instruction.dual is not None:
        other = touched(instruction.dual, arch)
        reads, writes = reads | other.reads, writes | other.writes
    family = next((prefix for prefix in FAMILIES if instruction.name.startswith(prefix)), "")
    family = "vmem" if family not in ("", "ds_") else family
    return Touched(reads, writes, family, high_reads, high_writes, _copied(instruction, printed))


def _copied(instruction: Instruction, printed: Sequence[Operand]) -> Copied | None:
    name = instruction.name
    if name == "v_mov_b64" and printed[1].kind in "vs" and printed[1].count == 2:
        source, target = ((register_bits(item, 0, 1), register_bits(item, 1, 1)) for item in (printed[1], printed[0]))
        return Copied("pair", source, target)
    if name in ("v_writelane_b32", "v_readlane_b32") and printed[2].kind == "constant" and printed[1].kind in "vs":
        kind: Literal["out", "back"] = "out" if name == "v_writelane_b32" else "back"
        return Copied(kind, (register_bits(printed[1]),), (register_bits(printed[0]),), int(printed[2].value))
    return None


def _whole(instruction: Instruction, source: int, operand: Operand) -> bool:
    """True if both registers of a pair matter: packed arithmetic can take the lower one twice."""
    if not instruction.name.startswith("v_pk_") or operand.count != 2:
        return True
    return bool(selection(instruction, "op_sel", source, 0) or selection(instruction, "op_sel_hi", source, 1))


def _merges_masks(instruction: Instruction) -> bool:
    """``mask = mask & ~exec``, before the lanes of exec are set: compilers begin with a mask that is undefined."""
    return instruction.name.startswith(("s_andn2_b", "s_and_not1_b")) and instruction.operands[2].startswith("exec")


def _operands(instruction: Instruction) -> list[Operand]:
    """Those that can be registers: some scalar instructions have words instead (counters, messages)."""
    try:
        return [Operand.parse(text) for text in instruction.operands]
    except ValueError:
        return []


class Program:
    """The instructions of one function, with their steps. An unknown one fails when it is reached, not before.

    An instruction is decoded when it is first reached: of a kernel's instructions a launch executes a part.
    """

    def __init__(self, name: str, instructions: Sequence[Instruction], arch: Arch) -> None:
        self.name, self.arch = name, arch
        self.instructions = list(instructions)
        self.at = {instruction.address: i for i, instruction in enumerate(self.instructions)}
        count = len(self.instructions)
        self.steps: list[Step] = [self._first(at) for at in range(count)]
        self.steps.append(_unknown(f"{name}: ran past the end of the program"))
        self.touched: list[Touched | None] = [None] * count + [Touched(0, 0, "")]
        self.masks = [EVERY_REGISTER] * count + [0]
        # Functions save registers that their callers may not have written.
        self.calls = any(instruction.name in CALLS for instruction in self.instructions)
        self.registers = _highest(self.instructions)
        self._targets = {item.target for item in self.instructions if item.target is not None}

    def unknown(self) -> list[str]:
        """The instructions without semantics, as text."""
        return [item.text for item in self.instructions if isinstance(_meaning(item, self.arch), str)]

    def _first(self, at: int) -> Step:
        return lambda w: self._decode(at)(w)

    def _decode(self, at: int) -> Step:
        """Puts an instruction's own step into its place, and what it touches."""
        meaning = _meaning(self.instructions[at], self.arch)
        step, one = (_unknown(meaning), Touched(0, 0, "")) if isinstance(meaning, str) else meaning
        if lacking := hazard_of(self.instructions, at, self._targets, self.arch):
            step = _hazardous(lacking)
        self.steps[at], self.touched[at], self.masks[at] = step, one, one.reads | one.writes
        return step

    def guard(self, w: Waves, at: int) -> None:
        """An instruction touches registers that are not simply there. Raises ``MissingWait`` and others."""
        if self.touched[at] is None:
            self._decode(at)
        one = self.touched[at]
        assert one is not None
        pending = w.queues.registers if w.run.checks.waits else 0
        if wrong := pending & one.reads:
            raise MissingWait(f"reads {name_register(wrong)} before its load has been waited for")
        if (wrong := pending & one.writes) and not self._in_order(w, wrong, one):
            raise MissingWait(f"writes {name_register(wrong)} while a load into it is under way")
        if one.copy is not None and w.run.checks.uninitialised_registers:
            self._copy(w, one.copy)
            w.hazard = w.unwritten | w.lost_registers() | pending
            return
        missing = w.unwritten & one.reads
        if wrong := missing & ~one.high_reads:
            raise UninitialisedRegister(f"reads {name_register(wrong)}, which nothing has written")
        w.unwritten &= ~one.writes
        if missing:
            w.unwritten |= one.high_writes
        if w.lost:
            w.lost = frozenset(place for place in w.lost if not place[0] & one.writes)
        w.hazard = w.unwritten | w.lost_registers() | pending

    @staticmethod
    def _copy(w: Waves, copy: Copied) -> None:
        """Undefined registers stay undefined where they are copied to."""
        if copy.kind == "pair":
            undefined = [bool(w.unwritten & bits) for bits in copy.source]
            for bits, lacks in zip(copy.target, undefined, strict=True):
                w.unwritten = w.unwritten | bits if lacks else w.unwritten & ~bits
            return
        (source,), (target,) = copy.source, copy.target
        if copy.kind == "out":
            # The other lanes of the target stay what they are, and so does the target for who reads all of them.
            place = (target, copy.lane)
            if w.unwritten & source:
                w.lost |= {place}
            else:
                w.lost -= {place}
            w.unwritten &= ~target
            return
        lacks = bool(w.unwritten & source) or (source, copy.lane) in w.lost
        w.unwritten = w.unwritten | target if lacks else w.unwritten & ~target

    @staticmethod
    def _in_order(w: Waves, registers: int, one: Touched) -> bool:
        """Loads of one unit return in order, so a later one may have the same destination."""
        if not one.family:
            return False
        kinds = {p.kind for queue in w.queues.by_counter.values() for p in queue if p.registers & registers}
        return kinds == {"lds" if one.family == "ds_" else "load"}


def _meaning(instruction: Instruction, arch: Arch) -> tuple[Step, Touched] | str:
    """An instruction's step and registers, or why it has none."""
    if instruction.target is not None or instruction.name in PLACED:
        return _decoded(instruction, arch)
    key = (arch.name, instruction.text)
    if key not in _MEANINGS:
        if len(_MEANINGS) >= KEPT:
            _MEANINGS.clear()
        _MEANINGS[key] = _decoded(instruction, arch)
    return _MEANINGS[key]


def _decoded(instruction: Instruction, arch: Arch) -> tuple[Step, Touched] | str:
    try:
        return make_step(instruction, arch), touched(instruction, arch)
    except UnknownInstruction as error:
        return str(error)


def _unknown(text: str) -> Step:
    def step(w: Waves) -> None:
        raise UnknownInstruction(text)

    return step


def _hazardous(text: str) -> Step:
    def step(w: Waves) -> None:
        raise MissingNop(text)

    return step


def _highest(instructions: Sequence[Instruction]) -> int:
    """Vector registers to hold: the highest that is named, and one."""
    named = VECTORS.findall("\n".join(item.text for item in instructions))
    return 1 + max((int(last) + (ACCUMULATORS if kind == "a" else 0) for kind, last in named), default=0)


def name_register(bits: int) -> str:
    """The lowest register of a set."""
    index = (bits & -bits).bit_length() - 1
    if index >= 512:
        special = {106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi"}
        return special.get(index - 512, f"s{index - 512}")
    return f"v{index}" if index < 256 else f"a{index - 256}"

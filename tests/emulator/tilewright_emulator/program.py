"""A function of a code object, decoded: steps, and which registers each touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .alu_types import selection
from .arch import Arch
from .decode import make_step
from .errors import MissingWait, UninitialisedRegister, UnknownInstruction
from .instruction import Instruction, Operand, register_bits
from .registry import Step, find
from .state import Waves

CALLS = ("s_swappc_b64", "s_call_b64", "s_setpc_b64")
FAMILIES = ("ds_", "global_", "buffer_", "flat_", "scratch_")


@dataclass(frozen=True)
class Touched:
    """Registers that an instruction reads and writes, as bits (``register_bits``); its memory unit's prefix.

    ``high_reads``, ``high_writes``: those that are the upper half of a pair of the vector unit. Compilers leave upper
    halves undefined where only the lower ones matter: they stay so, instead of being refused.
    """

    reads: int
    writes: int
    family: str
    high_reads: int = 0
    high_writes: int = 0


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
    return Touched(reads, writes, "vmem" if family not in ("", "ds_") else family, high_reads, high_writes)


def _whole(instruction: Instruction, source: int, operand: Operand) -> bool:
    """Whether both registers of a pair matter: packed arithmetic can take the lower one twice."""
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
    """The instructions of one function, with their steps. An unknown one fails when it is reached, not before."""

    def __init__(self, name: str, instructions: Sequence[Instruction], arch: Arch) -> None:
        self.name, self.arch = name, arch
        self.instructions = list(instructions)
        self.at = {instruction.address: i for i, instruction in enumerate(self.instructions)}
        self.steps: list[Step] = []
        self._unknown: list[int] = []
        self.touched: list[Touched] = []
        for instruction in self.instructions:
            step, registers = self._decoded(instruction)
            self.steps.append(step)
            self.touched.append(registers)
        self.steps.append(_unknown(f"{name}: ran past the end of the program"))
        self.touched.append(Touched(0, 0, ""))
        self.masks = [one.reads | one.writes for one in self.touched]
        # Functions save registers that their callers may not have written.
        self.calls = any(instruction.name in CALLS for instruction in self.instructions)
        self.registers = _highest(self.masks)

    def unknown(self) -> list[str]:
        """The instructions without semantics, as text."""
        return [self.instructions[at].text for at in self._unknown]

    def _decoded(self, instruction: Instruction) -> tuple[Step, Touched]:
        try:
            return make_step(instruction, self.arch), touched(instruction, self.arch)
        except UnknownInstruction as error:
            self._unknown.append(len(self.steps))
            return _unknown(str(error)), Touched(0, 0, "")

    def guard(self, w: Waves, at: int) -> None:
        """An instruction touches registers that are not simply there. Raises ``MissingWait`` and others."""
        one = self.touched[at]
        pending = w.queues.registers if w.run.checks.waits else 0
        if wrong := pending & one.reads:
            raise MissingWait(f"reads {name_register(wrong)} before its load has been waited for")
        if (wrong := pending & one.writes) and not self._in_order(w, wrong, one):
            raise MissingWait(f"writes {name_register(wrong)} while a load into it is under way")
        missing = w.unwritten & one.reads
        if wrong := missing & ~one.high_reads:
            raise UninitialisedRegister(f"reads {name_register(wrong)}, which nothing has written")
        w.unwritten &= ~one.writes
        if missing:
            w.unwritten |= one.high_writes
        w.hazard = w.unwritten | pending

    @staticmethod
    def _in_order(w: Waves, registers: int, one: Touched) -> bool:
        """Loads of one unit return in order, so a later one may have the same destination."""
        if not one.family:
            return False
        kinds = {p.kind for queue in w.queues.by_counter.values() for p in queue if p.registers & registers}
        return kinds == {"lds" if one.family == "ds_" else "load"}


def _unknown(text: str) -> Step:
    def step(w: Waves) -> None:
        raise UnknownInstruction(text)

    return step


def _highest(masks: Sequence[int]) -> int:
    """Vector registers to hold: the highest that is named, and one."""
    vectors = 0
    for mask in masks:
        vectors |= mask & ((1 << 512) - 1)
    return max(vectors.bit_length(), 1)


def name_register(bits: int) -> str:
    """The lowest register of a set."""
    index = (bits & -bits).bit_length() - 1
    if index >= 512:
        special = {106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi"}
        return special.get(index - 512, f"s{index - 512}")
    return f"v{index}" if index < 256 else f"a{index - 256}"

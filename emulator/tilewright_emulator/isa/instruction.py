"""Instructions as text says them, and what their operands name."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tilewright_emulator.isa.registers import ACCUMULATORS, EXEC, FLAT_SCRATCH, M0, NULL, TTMP, VCC

Kind = Literal["v", "s", "constant", "scc", "off"]

SPECIAL = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1), "null": (NULL, 2),
    "flat_scratch": (FLAT_SCRATCH, 2), "flat_scratch_lo": (FLAT_SCRATCH, 1), "flat_scratch_hi": (FLAT_SCRATCH + 1, 1),
}  # fmt: skip
REGISTER = re.compile(r"(v|a|s|ttmp)(?:(\d+)|\[(\d+)(?::(\d+))?\])(?:\.([lh]))?")


@dataclass(frozen=True)
class Operand:
    """One operand.

    ``kind``: "v" (vector register; accumulation registers begin at 256), "s" (scalar register, special ones included),
    "constant", "scc", "off". ``index``, ``count``: registers. ``half``: "l" or "h" of a 16-bit register operand.
    ``value``: of a constant, an int (inline or literal, as printed) or a float (inline, as printed).
    """

    text: str
    kind: Kind
    index: int = 0
    count: int = 1
    half: str = ""
    value: int | float = 0
    negative: bool = False
    absolute: bool = False
    extend: bool = False  # sext() of SDWA

    @staticmethod
    @functools.lru_cache(maxsize=8192)
    def parse(text: str) -> Operand:
        """Raises ``ValueError`` for what is no operand."""
        inner, negative, absolute, extend = text, False, False, False
        if match := re.fullmatch(r"neg\((.*)\)", inner):
            inner, negative = match[1], True
        elif inner.startswith("-") and not inner[1:2].isdigit():
            inner, negative = inner[1:], True
        if match := re.fullmatch(r"\|(.*)\||abs\((.*)\)", inner):
            inner, absolute = match[1] or match[2], True
        if match := re.fullmatch(r"lit(?:64)?\((.*)\)", inner):
            inner = match[1]
        if match := re.fullmatch(r"sext\((.*)\)", inner):
            inner, extend = match[1], True
        kind, index, count, half, value = _place(inner)
        return Operand(text, kind, index, count, half, value, negative, absolute, extend)


def _place(text: str) -> tuple[Kind, int, int, str, int | float]:
    if match := REGISTER.fullmatch(text):
        first = int(match[2] or match[3])
        count = int(match[4]) - first + 1 if match[4] else 1
        first += {"a": ACCUMULATORS, "ttmp": TTMP}.get(match[1], 0)
        return ("v" if match[1] in "va" else "s"), first, count, match[5] or "", 0
    if text in SPECIAL:
        return "s", *SPECIAL[text], "", 0
    if text in ("scc", "src_scc"):
        return "scc", 0, 1, "", 0
    if text == "off":
        return "off", 0, 0, "", 0
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        return "constant", 0, 0, "", int(text, 0)
    return "constant", 0, 0, "", float(text)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    ``mnemonic``: as printed. ``name``: without the suffix that says its encoding, which is in ``encoding`` ("e32",
    "e64", "sdwa", "dpp", "e64_dpp", or empty). ``modifiers``: ``offset:16`` is ``{"offset": "16"}``, a bare word like
    ``offen`` is ``{"offen": ""}``. ``target``: where a branch goes. ``dual``: the second half of a VOPD pair (the
    first half is the instruction itself; both are named ``v_...``, not ``v_dual_...``).
    """

    address: int
    mnemonic: str
    name: str
    encoding: str
    operands: tuple[str, ...]
    modifiers: Mapping[str, str] = field(default_factory=dict)
    target: int | None = None
    dual: Instruction | None = None
    text: str = ""
    size: int = 4

    def operand(self, index: int) -> Operand:
        return Operand.parse(self.operands[index])

    def number(self, modifier: str, default: int = 0) -> int:
        """A modifier's value as an integer."""
        return int(self.modifiers.get(modifier, str(default)), 0)


def register_bits(operand: Operand, first: int = 0, count: int | None = None) -> int:
    """The registers of an operand (or ``count`` of them from ``first``) as bits of an integer, scalar ones from 512."""
    if operand.kind not in "vs" or (operand.kind == "s" and operand.index >= NULL):
        return 0
    taken = operand.count - first if count is None else count
    return ((1 << taken) - 1) << (operand.index + first + (512 if operand.kind == "s" else 0))

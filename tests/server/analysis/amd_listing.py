"""Small programs as ``llvm-objdump`` prints them, written by hand, without a tool."""

from __future__ import annotations

import re

from tilewright_tools.analysis.disassembly import Function, Instruction, parse

ENTRY = 0x1000
BYTES = 8
"""Every instruction here takes two words, whatever it would take in truth."""


def function(text: str, name: str = "kernel") -> Function:
    """The function of a program: a line each for labels (``again:``) and instructions; branches name labels."""
    lines = [line.split(";")[0].strip() for line in text.strip().splitlines()]
    lines = [line for line in lines if line]
    labels: dict[str, int] = {}
    at = ENTRY
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = at
        else:
            at += BYTES
    printed, at = [f"{ENTRY:016x} <{name}>:"], ENTRY
    for line in (line for line in lines if not line.endswith(":")):
        word, shown = 0, line
        if match := re.fullmatch(r"(s_c?branch\w*) (\w+)", line):
            word = (labels[match[2]] - at - 4) // 4 & 0xFFFF
            shown = f"{match[1]} {word}"
        printed.append(f"\t{shown} // {at:012X}: {word:08X} 00000000")
        at += BYTES
    (found,) = parse("\n".join(printed))
    return found


def instructions(text: str) -> tuple[Instruction, ...]:
    """The instructions of a program without labels."""
    return function(text).instructions

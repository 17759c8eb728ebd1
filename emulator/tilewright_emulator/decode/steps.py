"""Disassembly to instructions, and instructions to steps."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace

from tilewright_emulator.decode.operands import dual_step, operation, step_of
from tilewright_emulator.decode.registry import Step, find, load_semantics
from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction

ENCODINGS = ("_e64_dpp", "_e32", "_e64", "_sdwa", "_dpp")
# A modifier of the last operand: `offset:16`, `quad_perm:[0,1,2,3]`, `offen`.
MODIFIER = re.compile(r"([a-z][a-z0-9_]*)(?::(\[[^\]]*\]|\S+))?")
NO_OPERANDS = ("s_waitcnt", "s_delay_alu", "s_sendmsg", "s_wait_alu", "s_waitcnt_depctr", "s_wait_event")


def split_operands(text: str) -> list[str]:
    """At commas outside brackets and parentheses."""
    parts, depth, last = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parts.append(text[last:position].strip())
            last = position + 1
    if rest := text[last:].strip():
        parts.append(rest)
    return parts


def _modifiers(operands: list[str]) -> tuple[list[str], dict[str, str]]:
    """Takes the words after the last operand off it."""
    if not operands:
        return [], {}
    words = operands[-1].split()
    first = next((i for i, word in enumerate(words) if i or re.match(r"[a-z_0-9]+:", word)), len(words))
    kept = " ".join(words[:first])
    found = {m[1]: m[2] or "" for m in MODIFIER.finditer(" ".join(words[first:]))}
    return [*operands[:-1], *([kept] if kept else [])], found


def parse(text: str, address: int = 0, size: int = 4, target: int | None = None) -> Instruction:
    """An instruction as llvm-objdump prints it, without address and encoding."""
    text = text.strip()
    if " :: " in text:
        first, second = (parse(half, address, size) for half in text.split(" :: "))
        return replace(first, dual=second, text=text, mnemonic=text.split()[0])
    return Instruction(address, *_words(text), target, None, text, size)


@functools.lru_cache(maxsize=1 << 15)
def _words(text: str) -> tuple[str, str, str, tuple[str, ...], Mapping[str, str]]:
    """Mnemonic, name, encoding, operands and modifiers."""
    mnemonic, _, rest = text.partition(" ")
    name, encoding = mnemonic, ""
    for suffix in ENCODINGS:
        if mnemonic.endswith(suffix):
            name, encoding = mnemonic[: -len(suffix)], suffix[1:]
            break
    name = name.replace("v_dual_", "v_", 1)
    if name in NO_OPERANDS:
        return mnemonic, name, encoding, (rest.strip(),), {}
    operands, modifiers = _modifiers(split_operands(rest))
    if mnemonic == "v_dual_cndmask_b32":  # its mask is vcc and is not printed
        operands.append("vcc_lo")
    return mnemonic, name, encoding, tuple(operands), modifiers


def make_step(instruction: Instruction, arch: Arch) -> Step:
    """The closure that executes an instruction. Raises ``UnknownInstruction``."""
    load_semantics()
    row = find(instruction, arch)
    try:
        if instruction.dual is None:
            return step_of(row, instruction, arch)
        other = find(instruction.dual, arch)
        alone = replace(instruction, dual=None)
        if row.function is None or other.function is None:
            raise UnknownInstruction(f"half of a pair that is not a function of values: {instruction.text}")
        return dual_step(operation(row, alone, arch), operation(other, instruction.dual, arch))
    except (ValueError, IndexError, KeyError) as error:
        raise UnknownInstruction(f"{arch.name}: cannot read `{instruction.text}`: {error}") from error

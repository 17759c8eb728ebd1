"""Modifiers of vector instructions: DPP, SDWA, clamp and omod.

The three functions here are called once for every operand (or instruction) when a program is decoded; what they return
runs with it. ``None`` and the function itself mean: nothing to do, which keeps the common case fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .arch import Arch
from .errors import UnknownInstruction
from .instruction import Instruction, Operand
from .state import Array, Waves


def source_lanes(
    instruction: Instruction, operand: Operand, source: int, arch: Arch
) -> Callable[[Waves, Array], Array] | None:
    """What happens to the raw 32-bit lanes of printed source ``source`` (-1: the destination's old value)."""
    if instruction.encoding in ("sdwa", "dpp", "e64_dpp") and source >= 0:
        raise UnknownInstruction(f"not modelled yet: {instruction.text}")
    return None


def result_lanes(
    instruction: Instruction, operand: Operand, arch: Arch
) -> Callable[[Waves, Array], tuple[Array, Array]] | None:
    """What happens to a 32-bit result: ``change(waves, value)`` gives the value and the lanes (bool) to write."""
    if instruction.encoding in ("sdwa", "dpp", "e64_dpp"):
        raise UnknownInstruction(f"not modelled yet: {instruction.text}")
    return None


def wrap_function(
    function: Callable[..., Any], instruction: Instruction, dst: tuple[str, ...], arch: Arch
) -> Callable[..., Any]:
    """Clamp and omod, which apply to the result's value before it is written."""
    if "clamp" in instruction.modifiers or "mul" in instruction.modifiers or "div" in instruction.modifiers:
        raise UnknownInstruction(f"not modelled yet: {instruction.text}")
    return function

"""The table of instruction semantics, and how modules of semantics put themselves into it.

Most instructions are a function of values: ``@semantic("v_add_u32", dst="u32", src="u32 u32")``. Those that need more
than their operands' values are made by a builder: ``@builder("v_readlane_b32")``. docs/emulator.md explains both.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tilewright_emulator.errors import UnknownInstruction
from tilewright_emulator.isa.arch import Arch
from tilewright_emulator.isa.instruction import Instruction
from tilewright_emulator.state.waves import Waves

Step = Callable[[Waves], Any]
Builder = Callable[[Instruction, Arch], Step]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Semantic:
    """A row of the table: a function of values with its signature, or a builder (then ``dst``, ``src`` are empty).

    ``written``: how many of the printed operands are destinations (they come first).
    """

    name: str
    archs: frozenset[str] | None
    function: Function | None = None
    build: Builder | None = None
    dst: tuple[str, ...] = ()
    src: tuple[str, ...] = ()
    written: int = 1


TABLE: dict[str, list[Semantic]] = {}
# Packages and modules that register semantics when they are imported.
SEMANTICS = ("tilewright_emulator.alu", "tilewright_emulator.matrix", "tilewright_emulator.access")
CONTROL = "tilewright_emulator.launch.control_flow"

# Types that take no printed operand.
IMPLICIT = frozenset({"scc", "vcc", "exec"})


def is_implicit(kind: str) -> bool:
    return kind in IMPLICIT or kind.startswith("dst:")


def _add(row: Semantic) -> None:
    rows = TABLE.setdefault(row.name, [])
    for other in rows:
        if row.archs is None or other.archs is None or row.archs & other.archs:
            raise ValueError(f"{row.name} is registered twice for the same architecture")
    rows.append(row)


def semantic(
    *names: str, dst: str = "u32", src: str, archs: Iterable[str] | None = None
) -> Callable[[Function], Function]:
    """Registers a function of source values that returns the destination's value (a tuple, if there are several).

    ``dst``, ``src``: operand types in printed order, separated by spaces. ``archs``: only for these.
    """

    def register(function: Function) -> Function:
        kinds = tuple(dst.split())
        written = sum(not is_implicit(kind) for kind in kinds)
        only = None if archs is None else frozenset(archs)
        for name in names:
            _add(Semantic(name, only, function, None, kinds, tuple(src.split()), written))
        return function

    return register


def builder(*names: str, written: int = 1, archs: Iterable[str] | None = None) -> Callable[[Builder], Builder]:
    """Registers a function that makes the step of one instruction: ``build(instruction, arch) -> step(waves)``."""

    def register(function: Builder) -> Builder:
        only = None if archs is None else frozenset(archs)
        for name in names:
            _add(Semantic(name, only, None, function, (), (), written))
        return function

    return register


@functools.cache
def load_semantics() -> None:
    """Imports every module of semantics, which fills the table."""
    importlib.import_module(CONTROL)
    for name in SEMANTICS:
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            importlib.import_module(module.name)


def find(instruction: Instruction, arch: Arch) -> Semantic:
    """The row for an instruction. Raises ``UnknownInstruction``."""
    for row in TABLE.get(instruction.name, ()):
        if row.archs is None or arch.name in row.archs:
            return row
    raise UnknownInstruction(f"{arch.name}: no semantics for `{instruction.text}` ({instruction.name})")

"""Declarations of operations: operands and attributes with their rules, from which requests are read and pages made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tilewright_kit.contract.problem import Attribute, OperationRequest, Role
from tilewright_kit.types.dtypes import DType

__all__ = ["AttributeSpec", "Declaration", "Example", "OperandSpec", "ValueType", "choices_of"]

MOST_INTEGER = 2**63 - 1
"""Largest integer of the protocol."""


class ValueType(str, Enum):
    """Types of an attribute's value, by the names of the fields of the protocol's message."""

    FLAG = "flag"
    INTEGER = "integer"
    NUMBER = "number"
    TEXT = "text"
    INTEGERS = "integers"


@dataclass(frozen=True, slots=True)
class AttributeSpec:
    """An attribute and its rules, which reading applies."""

    name: str
    summary: str
    types: tuple[ValueType, ...]
    default: Attribute | None = None
    """The value that leaving it out stands for; None: no single value does, and ``absent`` says what happens."""
    absent: str = ""
    lowest: float | None = None
    """Least value, itself allowed; also of each number of a list."""
    highest: float | None = None
    choices: tuple[str, ...] = ()
    """The texts that are allowed; empty: any, or no text at all."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further spellings of choices."""
    unit: str = ""
    constraint: str = ""
    """Rules beyond these, as a sentence."""


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """A tensor of an operation."""

    name: str
    """Without numbers: ``d`` stands for ``d[0]``, ``d[1]``, ... if ``is_list``."""
    role: Role
    summary: str
    shapes: tuple[str, ...]
    """Forms of its shape: ``[*batch, M, K]``."""
    ranks: tuple[int, int]
    """Fewest and most dimensions."""
    dtypes: tuple[DType, ...]
    """Element types that it may have, each in some combination."""
    optional: bool = False
    """Inputs: may be left out. Outputs: are not computed unless they are asked for."""
    is_list: bool = False
    constraint: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """A request that the operation takes."""

    title: str
    request: OperationRequest


@dataclass(frozen=True, slots=True)
class Declaration:
    """All that a caller must know of an operation to use it."""

    summary: str
    operands: tuple[OperandSpec, ...]
    attributes: tuple[AttributeSpec, ...] = ()
    examples: tuple[Example, ...] = ()
    notes: tuple[str, ...] = ()
    """Paragraphs on how operands and attributes act together."""

    def of_role(self, role: Role) -> tuple[OperandSpec, ...]:
        return tuple(item for item in self.operands if item.role is role)


def choices_of(words: Iterable[Enum]) -> tuple[str, ...]:
    """Texts of a list of words."""
    return tuple(str(word.value) for word in words)

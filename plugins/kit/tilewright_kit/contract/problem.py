"""Problems: operations on tensors of given shapes, apart from any kernel."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from tilewright_kit.types.tensor import TensorDesc, contiguous_strides

__all__ = ["Attribute", "Operand", "OperationRequest", "Problem", "Role", "problem_name"]

Attribute = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""Types of a request's attributes."""
_SHOWN = 8
"""Operands that the name of a problem lists; a digest stands for the rest."""


class Role(str, Enum):
    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Operand:
    """A named tensor of a problem. Members of a list of tensors are named ``d[0]``, ``d[1]``, ..."""

    name: str
    desc: TensorDesc
    role: Role


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """A caller's request, in the words of the protocol. ``outputs`` may lack tensors that the operation can infer."""

    operation: str
    inputs: Mapping[str, TensorDesc]
    outputs: Mapping[str, TensorDesc] = field(default_factory=dict)
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


class Problem(ABC):
    """A checked request. Subclasses are frozen dataclasses: hashable, and equal exactly if one plan serves both."""

    operation: ClassVar[str]

    @property
    @abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """All inputs and outputs in binding order, with their full descriptions."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Arithmetic operations, a multiply-add counted as two."""

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written at the least: every operand once."""
        return sum(operand.desc.size * operand.desc.dtype.bytes for operand in self.operands)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to write: a legal problem that needs no kernel."""
        return all(operand.desc.size == 0 for operand in self.operands if operand.role is Role.OUTPUT)

    @property
    def signature(self) -> Hashable:
        """The key under which plans are cached."""
        return self

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """JSON-able summary for people and logs."""


def problem_name(operation: str, operands: Iterable[Operand], attributes: Mapping[str, Attribute]) -> str:
    """The name under which bundles keep a problem: what is computed, on which tensors, with which attributes.

    Strides are named where a tensor is not contiguous. Equal names mean equal problems.
    """
    shown = [f"{item.name}: {_described(item.desc)}" for item in operands]
    text = ", ".join(shown)
    if len(shown) > _SHOWN:
        text = f"{', '.join(shown[:_SHOWN])}, ... {hashlib.sha256(text.encode()).hexdigest()[:12]}"
    steps = [f"{name}={_text(value)}" for name, value in sorted(attributes.items())]
    return f"{operation}({text}{'; ' if steps else ''}{', '.join(steps)})"


def _described(desc: TensorDesc) -> str:
    text = f"{desc.dtype.value}[{', '.join(map(str, desc.shape))}]"
    if desc.packing:
        return f"{text} packed {desc.packing}"
    return text if desc.strides == contiguous_strides(desc.shape) else f"{text}:[{', '.join(map(str, desc.strides))}]"


def _text(value: Attribute) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)

"""Problems: operations on tensors of given shapes, apart from any kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from tilewright_kit.types.tensor import TensorDesc

__all__ = ["Attribute", "Operand", "OperationRequest", "Problem", "Role"]

Attribute = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""Types of a request's attributes."""


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

"""Execution plans: stages with a kernel, a launch geometry, arguments that name operands, and a workspace.

Arguments are described, not packed, until a device binds them: the same description serves a call by pointer on a CPU and a by-value parameter on a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from tilewright_kit.config import KernelConfig
from tilewright_kit.problem import Operand

__all__ = [
    "ARGS",
    "F64",
    "I64",
    "WORKSPACE",
    "Arg",
    "ExecutionPlan",
    "Geometry",
    "PackedArgs",
    "Pointer",
    "Stage",
    "Struct",
    "Table",
    "WorkspaceLayout",
    "pack",
]

WORKSPACE = "workspace"
"""Reserved operand name: the scratch memory of the plan."""
ARGS = "@args"
"""Reserved operand name: the packed argument block itself (pointers from the root into its tables)."""

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Pointer:
    """Address of an operand plus ``offset`` bytes; the empty operand is a null pointer."""

    operand: str = ""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class I64:
    value: int


@dataclass(frozen=True, slots=True)
class F64:
    value: float


@dataclass(frozen=True, slots=True)
class Struct:
    """Fields laid out in order, each 8 bytes wide or a nested struct."""

    fields: tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A pointer to ``rows`` laid out one after the other (null if there are none)."""

    rows: tuple[Struct, ...]


Arg = Union[Pointer, I64, F64, Struct, Table]


@dataclass(frozen=True, slots=True)
class PackedArgs:
    """An argument block with holes: ``relocations`` are (offset in block, operand name, addend)."""

    template: bytes
    relocations: tuple[tuple[int, str, int], ...]

    def bind(self, addresses: Mapping[str, int], block: bytearray | memoryview, base: int) -> None:
        """Write the block into ``block``, which will lie at address ``base``, with operands at ``addresses``."""
        block[: len(self.template)] = self.template
        for offset, operand, addend in self.relocations:
            address = base if operand == ARGS else addresses[operand]
            struct.pack_into("<Q", block, offset, address + addend)


def pack(root: Struct) -> PackedArgs:
    """Lay out ``root``, then its tables breadth-first, with pointers between them as relocations."""
    block = bytearray()
    relocations: list[tuple[int, str, int]] = []
    pending: list[tuple[int, Table]] = []

    def put(arg: Arg) -> None:
        if isinstance(arg, Struct):
            for item in arg.fields:
                put(item)
        elif isinstance(arg, I64):
            block.extend(struct.pack("<q", arg.value))
        elif isinstance(arg, F64):
            block.extend(struct.pack("<d", arg.value))
        elif isinstance(arg, Pointer):
            if arg.operand:
                relocations.append((len(block), arg.operand, arg.offset))
            block.extend(bytes(8))
        else:
            if arg.rows:
                pending.append((len(block), arg))
            block.extend(bytes(8))

    put(root)
    while pending:
        hole, table = pending.pop(0)
        relocations.append((hole, ARGS, len(block)))
        for row in table.rows:
            put(row)
    return PackedArgs(bytes(block), tuple(relocations))


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a stage is launched: on a CPU a team of threads, on a GPU a grid of workgroups."""

    team: int = 1
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One launch: entry ``role`` of the artifact that ``config`` compiles to."""

    name: str
    config: KernelConfig
    role: str
    args: Struct
    geometry: Geometry = Geometry()

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "operation": self.config.operation,
            "kernel": self.config.name,
            "config": self.config.to_dict(),
            "role": self.role,
            "args": _to_json(self.args),
            "geometry": {
                item: getattr(self.geometry, item) for item in ("team", "grid", "block", "cluster", "shared_bytes")
            },
        }


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Stages in launch order, and what they need. A plan without stages is complete: there was nothing to compute."""

    operation: str
    arch: str
    operands: tuple[Operand, ...]
    stages: tuple[Stage, ...]
    workspace_bytes: int = 0
    notes: tuple[str, ...] = ()
    """What the planner wants the caller to know, for example that a layout was transformed first."""
    flops: int = 0
    bytes_moved: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kernels(self) -> tuple[KernelConfig, ...]:
        """The distinct kernels of the plan, in order of first use."""
        return tuple(dict.fromkeys(stage.config for stage in self.stages))

    def to_dict(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "arch": self.arch,
            "operands": [
                {"name": item.name, "role": item.role.value, "tensor": item.desc.to_dict()} for item in self.operands
            ],
            "stages": [stage.to_dict() for stage in self.stages],
            "workspace_bytes": self.workspace_bytes,
            "notes": list(self.notes),
            "flops": self.flops,
            "bytes_moved": self.bytes_moved,
        }


class WorkspaceLayout:
    """Hands out aligned offsets in a workspace that does not exist yet."""

    def __init__(self) -> None:
        self.bytes = 0

    def reserve(self, nbytes: int) -> int:
        """Offset of a new part of ``nbytes`` bytes, aligned to 64."""
        offset = -(-self.bytes // ALIGNMENT) * ALIGNMENT
        self.bytes = offset + nbytes
        return offset


def _to_json(arg: Arg) -> Any:
    if isinstance(arg, Struct):
        return [_to_json(item) for item in arg.fields]
    if isinstance(arg, Table):
        return {"table": [_to_json(row) for row in arg.rows]}
    if isinstance(arg, Pointer):
        return {"pointer": arg.operand, "offset": arg.offset}
    return {"f64": arg.value} if isinstance(arg, F64) else {"i64": arg.value}

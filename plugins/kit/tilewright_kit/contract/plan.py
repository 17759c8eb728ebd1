"""Execution plans: stages with a kernel, a launch geometry, arguments that name operands, and a workspace.

Arguments are described, not packed, until a device binds them: the same description serves a call by pointer on a CPU
and a by-value parameter on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.arguments import (
    ARGS,
    COUNTERS,
    F64,
    I64,
    WORKSPACE,
    Arg,
    PackedArgs,
    PixelWalk,
    Pointer,
    Struct,
    Table,
    TensorMap,
    pack,
)
from tilewright_kit.contract.problem import Operand, Role
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc

__all__ = [
    "ARGS",
    "COUNTERS",
    "F64",
    "I64",
    "WORKSPACE",
    "Arg",
    "ExecutionPlan",
    "Geometry",
    "PackedArgs",
    "PixelWalk",
    "Pointer",
    "Stage",
    "Struct",
    "Table",
    "TensorMap",
    "WorkspaceLayout",
    "pack",
]

T = TypeVar("T")

ALIGNMENT = 64
MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Geometry:
    """The launch of a stage: on a CPU a team of threads, on a GPU a grid of workgroups."""

    team: int = 1
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    dependent: bool = False
    """May begin before the launch before it has ended (programmatic dependent launch): the kernel waits by itself."""


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
                "team": self.geometry.team,
                "grid": list(self.geometry.grid),
                "block": list(self.geometry.block),
                "cluster": list(self.geometry.cluster),
                "shared_bytes": self.geometry.shared_bytes,
                "dependent": self.geometry.dependent,
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
    """Remarks of the planner for the caller, for example that a layout was transformed first."""
    flops: int = 0
    bytes_moved: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    counter_bytes: int = 0
    """Memory that is zero before every run and left zero by it, for kernels whose workgroups wait for each other."""

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
            "counter_bytes": self.counter_bytes,
            "notes": list(self.notes),
            "flops": self.flops,
            "bytes_moved": self.bytes_moved,
            "details": dict(self.details),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], config_types: Mapping[str, type[KernelConfig]]) -> ExecutionPlan:
        """The inverse of ``to_dict``, given each operation's configuration class.

        Raises ``InvalidArgumentError`` naming the damaged entry.
        """
        reader = _Reader(config_types)
        get = reader.get
        return cls(
            operation=get(record, "operation", "plan", str),
            arch=get(record, "arch", "plan", str),
            operands=reader.each(record, "operands", "plan", reader.operand),
            stages=reader.each(record, "stages", "plan", reader.stage),
            workspace_bytes=reader.count(record, "workspace_bytes", "plan"),
            counter_bytes=reader.count(record, "counter_bytes", "plan"),
            notes=reader.each(record, "notes", "plan", reader.text),
            flops=reader.count(record, "flops", "plan"),
            bytes_moved=reader.count(record, "bytes_moved", "plan"),
            details=get(record, "details", "plan", dict),
        )


class WorkspaceLayout:
    """Hands out aligned offsets in a workspace that does not exist yet."""

    def __init__(self, alignment: int = ALIGNMENT) -> None:
        self.alignment = alignment
        """Bytes that offsets are multiples of."""
        self.bytes = 0
        self.offsets: dict[str, int] = {}
        """Offsets of the parts that have a name."""

    def reserve(self, nbytes: int, name: str = "") -> int:
        """Offset of a new part of ``nbytes`` bytes."""
        offset = -(-self.bytes // self.alignment) * self.alignment
        self.bytes = offset + nbytes
        if name:
            self.offsets[name] = offset
        return offset


_MAP_SIZES = ("sizes", "strides", "box")
_WALK = ("lower", "upper", "step")


def _to_json(arg: Arg) -> Any:
    if isinstance(arg, Struct):
        return [_to_json(item) for item in arg.fields]
    if isinstance(arg, Table):
        return {"table": [_to_json(row) for row in arg.rows]}
    if isinstance(arg, Pointer):
        return {"pointer": arg.operand, "offset": arg.offset}
    if isinstance(arg, I64):
        return {"i64": arg.value}
    if isinstance(arg, TensorMap):
        sizes = {name: list(getattr(arg, name)) for name in _MAP_SIZES}
        return {
            "map": arg.operand,
            "offset": arg.offset,
            "dtype": arg.dtype,
            "swizzle": arg.swizzle,
            "fetch": arg.fetch,
            **sizes,
            **({"walk": {name: list(getattr(arg.walk, name)) for name in _WALK}} if arg.walk else {}),
        }
    # JSON has no infinities and no NaN.
    return {"f64": arg.value if math.isfinite(arg.value) else str(float(arg.value))}


class _Reader:
    """Builds a plan from its record, naming the entry that is damaged."""

    def __init__(self, config_types: Mapping[str, type[KernelConfig]]) -> None:
        self.config_types = config_types

    @staticmethod
    def damaged(where: str, value: object, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{where}: expected {expected}", field=where, value=value, rule="plan_record")

    def get(self, record: Any, name: str, where: str, kind: type[T]) -> T:
        if not isinstance(record, Mapping):
            raise self.damaged(where, record, "an object")
        value = record.get(name)
        # A boolean is an int to isinstance.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.damaged(f"{where}.{name}", value, kind.__name__)
        return value

    def count(self, record: Any, name: str, where: str) -> int:
        value = self.get(record, name, where, int)
        if value < 0:
            raise self.damaged(f"{where}.{name}", value, "zero or more")
        return value

    def each(self, record: Any, name: str, where: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
        items = self.get(record, name, where, list)
        return tuple(read(item, f"{where}.{name}[{index}]") for index, item in enumerate(items))

    def text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise self.damaged(where, value, "str")
        return value

    def operand(self, record: Any, where: str) -> Operand:
        role = self.get(record, "role", where, str)
        if role not in {item.value for item in Role}:
            raise self.damaged(f"{where}.role", role, "input or output")
        tensor = TensorDesc.from_dict(self.get(record, "tensor", where, dict))
        return Operand(self.get(record, "name", where, str), tensor, Role(role))

    def stage(self, record: Any, where: str) -> Stage:
        operation = self.get(record, "operation", where, str)
        if operation not in self.config_types:
            raise self.damaged(f"{where}.operation", operation, f"one of {', '.join(sorted(self.config_types))}")
        config = self.config_types[operation].from_dict(self.get(record, "config", where, dict))
        kernel = self.get(record, "kernel", where, str)
        if kernel != config.name:
            raise self.damaged(f"{where}.kernel", kernel, "the name of its config")
        return Stage(
            self.get(record, "name", where, str),
            config,
            self.get(record, "role", where, str),
            self.struct(record.get("args"), f"{where}.args"),
            self.geometry(self.get(record, "geometry", where, dict), f"{where}.geometry"),
        )

    def geometry(self, record: Any, where: str) -> Geometry:
        def triple(name: str) -> tuple[int, int, int]:
            sizes = self.get(record, name, where, list)
            if len(sizes) != 3 or any(type(size) is not int or size < 0 for size in sizes):
                raise self.damaged(f"{where}.{name}", sizes, "three sizes")
            return (sizes[0], sizes[1], sizes[2])

        return Geometry(
            team=self.count(record, "team", where),
            grid=triple("grid"),
            block=triple("block"),
            cluster=triple("cluster"),
            shared_bytes=self.count(record, "shared_bytes", where),
            dependent=self.get(record, "dependent", where, bool),
        )

    def struct(self, value: Any, where: str, depth: int = 0) -> Struct:
        if not isinstance(value, list) or depth > MAX_DEPTH:
            raise self.damaged(where, value, f"a list, nested at most {MAX_DEPTH} deep")
        return Struct(tuple(self.arg(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)))

    def arg(self, value: Any, where: str, depth: int) -> Arg:
        if isinstance(value, list):
            return self.struct(value, where, depth)
        match value:
            case {"table": list(rows), **rest} if not rest:
                items = (self.struct(row, f"{where}.table[{index}]", depth) for index, row in enumerate(rows))
                return Table(tuple(items))
            case {"pointer": str(operand), "offset": int(offset), **rest} if not rest and type(offset) is int:
                return Pointer(operand, offset)
            case {"map": str()}:
                return self.tensor_map(value, where)
            case {"i64": int(number), **rest} if not rest and type(number) is int:
                return I64(number)
            case {"f64": (float() | int()) as number, **rest} if not rest and type(number) is not bool:
                return F64(float(number))
            case {"f64": ("inf" | "-inf" | "nan") as number, **rest} if not rest:
                return F64(float(number))
        raise self.damaged(where, value, "a list, table, pointer, i64 or f64")

    def tensor_map(self, record: Any, where: str) -> TensorMap:
        def sizes(name: str) -> tuple[int, ...]:
            values = self.get(record, name, where, list)
            if any(type(size) is not int or size < 0 for size in values):
                raise self.damaged(f"{where}.{name}", values, "sizes that are whole numbers")
            return tuple(values)

        return TensorMap(
            self.get(record, "map", where, str),
            self.get(record, "offset", where, int),
            self.get(record, "dtype", where, str),
            sizes("sizes"),
            sizes("strides"),
            sizes("box"),
            self.count(record, "swizzle", where),
            self.count(record, "fetch", where),
            self.pixel_walk(record["walk"], f"{where}.walk") if "walk" in record else None,
        )

    def pixel_walk(self, record: Any, where: str) -> PixelWalk:
        def steps(name: str) -> tuple[int, ...]:
            values = self.get(record, name, where, list)
            if any(type(value) is not int for value in values):
                raise self.damaged(f"{where}.{name}", values, "whole numbers")
            return tuple(values)

        return PixelWalk(*map(steps, _WALK))

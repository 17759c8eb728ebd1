"""Plans made of other operations' plans: operands renamed, intermediate results in the workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilewright_kit.contract.arguments import COUNTERS, WORKSPACE, Arg, Pointer, Struct, Table, TensorMap
from tilewright_kit.contract.plan import ExecutionPlan, Stage, WorkspaceLayout
from tilewright_kit.contract.problem import Operand
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["Composition"]


class Composition:
    """Collects plans that run one after the other, and makes one plan of them.

    Plans share the part of the workspace that is scratch to each; each has counters of its own.
    """

    def __init__(self) -> None:
        self._intermediates = WorkspaceLayout()
        self._parts: list[tuple[str, ExecutionPlan, dict[str, Pointer]]] = []

    def intermediate(self, desc: TensorDesc) -> Pointer:
        """Room for a tensor that one plan writes and later ones read."""
        return Pointer(WORKSPACE, self._intermediates.reserve(desc.nbytes))

    def add(self, label: str, plan: ExecutionPlan, operands: Mapping[str, str | Pointer]) -> None:
        """Append a plan. ``operands`` places each of its operands: the name of one of the whole, or an intermediate.

        ``label`` goes before the names of its stages.
        """
        places = {name: place if isinstance(place, Pointer) else Pointer(place) for name, place in operands.items()}
        self._parts.append((label, plan, places))

    def plan(self, operation: str, arch: str, operands: tuple[Operand, ...], **figures: Any) -> ExecutionPlan:
        """The whole, with ``flops`` and ``bytes_moved`` as given. Raises ``KeyError`` for an operand without place."""
        layout = WorkspaceLayout()
        layout.reserve(self._intermediates.bytes)
        scratch = layout.reserve(max((plan.workspace_bytes for _, plan, _ in self._parts), default=0))
        counters = WorkspaceLayout()
        stages: list[Stage] = []
        alignment: dict[str, int] = {}
        for label, plan, given in self._parts:
            places = {**given, WORKSPACE: Pointer(WORKSPACE, scratch)}
            places[COUNTERS] = Pointer(COUNTERS, counters.reserve(plan.counter_bytes))
            stages += (
                replace(stage, name=f"{label}.{stage.name}", args=_placed(stage.args, places)) for stage in plan.stages
            )
            for name, unit in plan.details.get("alignment", {}).items():
                place = places[name].operand
                if place != WORKSPACE:
                    alignment[place] = max(unit, alignment.get(place, 1))
        return ExecutionPlan(
            operation=operation,
            arch=arch,
            operands=operands,
            stages=tuple(stages),
            workspace_bytes=layout.bytes,
            counter_bytes=counters.bytes,
            notes=tuple(f"{label}: {note}" for label, plan, _ in self._parts for note in plan.notes),
            details={"alignment": alignment} if alignment else {},
            **figures,
        )


def _placed(struct: Struct, places: Mapping[str, Pointer]) -> Struct:
    """The arguments with every operand at its place."""
    return Struct(tuple(_moved(item, places) for item in struct.fields))


def _moved(arg: Arg, places: Mapping[str, Pointer]) -> Arg:
    if isinstance(arg, Struct):
        return _placed(arg, places)
    if isinstance(arg, Table):
        return Table(tuple(_placed(row, places) for row in arg.rows))
    if isinstance(arg, (Pointer, TensorMap)) and arg.operand:
        place = places[arg.operand]
        return replace(arg, operand=place.operand, offset=place.offset + arg.offset)
    return arg

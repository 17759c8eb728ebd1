"""Launch plans for devices that need not be there: planned and compiled, not loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.launch_plan import Entry, launch_plan
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest, problem_name
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.types.errors import BuildFailedError
from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.caller_launch import check_values
from tilewright_server.engine.execution.value_check import value_check
from tilewright_server.engine.kernels.store import KernelStore
from tilewright_server.engine.planning.plan_cache_entry import settled
from tilewright_server.engine.planning.planner import DOES_NOT_FIT, NEXT_TRIED, Planner
from tilewright_server.engine.types import Selection

__all__ = ["AheadOfTime", "CompiledPlan"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A launch plan with its code objects."""

    name: str
    plan: ExecutionPlan
    data: bytes
    objects: Mapping[bytes, bytes]
    """By their SHA-256."""


class AheadOfTime:
    """Thread-safe."""

    def __init__(self, planner: Planner, kernels: KernelStore) -> None:
        self._planner = planner
        self._kernels = kernels

    def compile(self, request: OperationRequest, selection: Selection, device: DeviceInfo, call: Call) -> CompiledPlan:
        """Choose a kernel for a device, build it, and make the launch plan. ``selection.device`` is not looked at.

        Raises what ``Engine.plan`` raises before it opens a device, and what ``caller_plan`` raises for plans that
        libtilewright cannot launch.
        """
        question = self._planner.question(request, selection, device)
        operation, problem = question.operation, question.problem
        ranked = Selector(question.strategy).rank(operation, problem, device)
        for place, item in enumerate(ranked):
            plan = settled(problem, operation.plan(problem, item.config, device))
            check_values(value_check(operation, problem, plan, device), plan, device)
            try:
                return self._made(operation, request, plan, device, call)
            except BuildFailedError as error:
                if error.rule not in DOES_NOT_FIT or place + 1 in (len(ranked), NEXT_TRIED):
                    raise
                log.warning("the next kernel is taken, since this one does not fit: %s", error)
        raise AssertionError("a ranking is never empty")

    def _made(
        self,
        operation: Operation[Any, Any],
        request: OperationRequest,
        plan: ExecutionPlan,
        device: DeviceInfo,
        call: Call,
    ) -> CompiledPlan:
        units = {config: self._kernels.unit(config, device.arch) for config in plan.kernels}
        self._kernels.obtain(list(units.values()), device.id, device.arch, call)
        objects: dict[bytes, bytes] = {}
        hashes = {}
        for config, unit in units.items():
            artifact = self._kernels.artifact(unit, device.arch, call)
            try:
                hashes[config] = bytes.fromhex(artifact.meta.binary_sha256)
                objects[hashes[config]] = artifact.binary.read_bytes()
            finally:
                artifact.release()
        entries = [
            Entry(hashes[stage.config], len(objects[hashes[stage.config]]), units[stage.config].symbol(stage.role))
            for stage in plan.stages
        ]
        name = problem_name(operation.name, plan.operands, request.attributes)
        return CompiledPlan(name, plan, launch_plan(plan, device, entries, name), objects)

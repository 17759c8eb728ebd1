"""Requests to results: what tests of execution share. A result is right if it agrees with the float64 reference within
``kit.compare.bound``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from conv_runner import Array, ConvRunner, draw

from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.plugin import ConvOperation
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.numerics.compare import compare
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.types.dtypes import DType

CONVS = {operation.name: operation for operation in map(ConvOperation, Direction)}


@dataclass(frozen=True)
class Planned:
    """A request, the kernel that serves it, and how."""

    problem: ConvProblem
    config: ConvConfig
    plan: ExecutionPlan

    @property
    def output(self) -> str:
        return next(item.name for item in self.problem.operands if item.role is Role.OUTPUT)

    def draw(self, seed: int = 0) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        return {item.name: draw(rng, item.desc) for item in self.problem.operands if item.role is Role.INPUT}


def planned(request: OperationRequest, device: DeviceInfo, config: ConvConfig | None = None) -> Planned:
    """Parse, select and plan. ``config`` is taken instead of the selected kernel, and must fit."""
    operation = CONVS[request.operation]
    problem = operation.parse(request)
    chosen = config or Selector().select(operation, problem, device).config
    assert isinstance(chosen, ConvConfig)
    assert not operation.mismatches(problem, chosen, device)
    return Planned(problem, chosen, operation.plan(problem, chosen, device))


def require_right(item: Planned, inputs: Mapping[str, Array], result: Array) -> None:
    """Compare a result with the reference."""
    truth = CONVS[item.problem.operation].reference(item.problem, inputs)[item.output]
    # Exact sums are scaled in fp32, which rounds a few times.
    acc = DType.FP32 if item.problem.dtype_out.is_float else item.problem.dtype_acc
    verdict = compare(result, truth, item.problem.dtype_out, max(item.problem.k, 1), acc)
    assert verdict.passed, f"{item.config.name}: {verdict}"


def check(
    runner: ConvRunner,
    device: DeviceInfo,
    request: OperationRequest,
    config: ConvConfig | None = None,
    team: int | None = None,
    seed: int = 0,
    in_place: bool = False,
) -> Planned:
    """All of it, with random inputs."""
    item = planned(request, device, config)
    inputs = item.draw(seed)
    memory = runner.run(item.plan, inputs, team, in_place)
    require_right(item, inputs, memory[item.output].view)
    return item


def check_all(
    runner: ConvRunner, device: DeviceInfo, requests: Sequence[OperationRequest], in_place: bool = False
) -> list[Planned]:
    """All of several, whose kernels are built together."""
    runner.prepare([planned(request, device).plan for request in requests])
    return [check(runner, device, request, in_place=in_place) for request in requests]

"""Operands that a case wants prepared by another operation before kernels are timed: weights packed ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright_kit.commands.cases import Case
from tilewright_kit.commands.discovery import command_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.selection.strategies import Heuristic, Selector
from tilewright_server.engine.engine import Engine

__all__ = ["PreparedOperand", "prepared_request"]


@dataclass(frozen=True, slots=True)
class PreparedOperand:
    """An operand whose place the output of ``plan`` takes."""

    name: str
    plan: ExecutionPlan


def prepared_request(
    engine: Engine, device: DeviceInfo, case: Case
) -> tuple[OperationRequest, Sequence[PreparedOperand]]:
    """The case's request with prepared operands in their places, and how they are prepared: each by the model's
    favourite among the kernels that can, so that every process finds the same.

    Raises ``UnsupportedError`` if no kernel of the device prepares an operand.
    """
    request, found = case.request(), []
    for name, step in command_of(request.operation).prepared(case).items():
        operation = engine.operations[step.operation]
        asked = OperationRequest(step.operation, {step.operand: request.inputs[name]}, {}, step.attributes)
        problem = operation.parse(asked)
        config = Selector(Heuristic()).rank(operation, problem, device)[0].config
        plan = operation.plan(problem, config, device)
        (out,) = (item.desc for item in plan.operands if item.role is Role.OUTPUT)
        request = replace(request, inputs={**request.inputs, name: out})
        found.append(PreparedOperand(name, plan))
    return request, found

"""From a problem to stages: one launch, none for an empty tensor."""

from __future__ import annotations

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import F64, I64, ExecutionPlan, Geometry, Pointer, Stage, Struct
from tilewright_rmsnorm.config import RmsNormConfig
from tilewright_rmsnorm.problem import RmsNormProblem

__all__ = ["plan"]


def plan(problem: RmsNormProblem, config: RmsNormConfig, device: DeviceInfo) -> ExecutionPlan:
    """The arguments are the template's ``Args``, field for field."""
    numbers = (problem.rows, problem.columns, problem.x.strides[0], problem.out.strides[0])
    args = Struct(
        (
            *(Pointer(name) for name in ("x", "weight", "out")),
            *(I64(number) for number in numbers),
            F64(problem.epsilon),
        )
    )
    stages = () if problem.is_empty else (Stage("rmsnorm", config, "main", args, Geometry(team=config.wave[0])),)
    return ExecutionPlan(
        "rmsnorm",
        device.arch.id,
        problem.operands,
        stages,
        flops=problem.flops,
        bytes_moved=problem.bytes_moved,
    )

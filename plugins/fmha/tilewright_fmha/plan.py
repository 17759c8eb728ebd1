"""From problem and kernel to stages."""

from __future__ import annotations

from tilewright_fmha.config import FmhaConfig
from tilewright_fmha.problem import FmhaProblem
from tilewright_fmha.rows import args_of
from tilewright_fmha.workspace import forward_bytes, lanes_of
from tilewright_kit.cost import ceil_div
from tilewright_kit.device import DeviceInfo
from tilewright_kit.errors import UnsupportedError
from tilewright_kit.plan import ExecutionPlan, Geometry, Stage

__all__ = ["plan_fmha"]


def plan_fmha(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> ExecutionPlan:
    """One stage ``forward``."""
    if device.arch.kind != "cpu" or not config.is_forward:
        raise UnsupportedError(
            f"there is no plan for {config.family} on {device.arch.kind} devices yet",
            field="config.family",
            value=config.family.value,
            rule="template_exists",
            fix="use a device of kind cpu, and attention without splits",
        )
    if problem.is_empty:
        return _plan(problem, device, (), 0)
    nbytes = forward_bytes(problem, config, lanes_of(device.arch))
    args = args_of(
        problem,
        parts={"workspace": 0},
        workspace_bytes=nbytes,
        q_tiles=ceil_div(problem.seq_q, config.m0),
        k_tiles=ceil_div(problem.seq_k, config.n0),
        tiles=problem.batch * problem.heads_q * ceil_div(problem.seq_q, config.m0),
    )
    return _plan(problem, device, (Stage("forward", config, "main", args, Geometry(team=config.team)),), nbytes)


def _plan(problem: FmhaProblem, device: DeviceInfo, stages: tuple[Stage, ...], nbytes: int) -> ExecutionPlan:
    return ExecutionPlan(
        operation=problem.operation,
        arch=device.arch.id,
        operands=problem.operands,
        stages=stages,
        workspace_bytes=nbytes,
        flops=problem.flops,
        bytes_moved=problem.bytes_moved,
        details={"alignment": {"*": problem.alignment}},
    )

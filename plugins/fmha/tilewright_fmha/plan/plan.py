"""Plans of attention: the stages of a kernel on a problem. Those of gradients are in ``backward``."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_fmha.candidates.applicability import holds
from tilewright_fmha.candidates.auxiliary_kernels import combine_of
from tilewright_fmha.candidates.wide_heads import value_parts
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import splits_tiles
from tilewright_fmha.config.gradients import turns_of
from tilewright_fmha.config.pipelines import is_specialised
from tilewright_fmha.config.warp_specialised import draws_tiles
from tilewright_fmha.footprint.cpu import forward_bytes, lanes_of
from tilewright_fmha.launch.geometry import launch_of
from tilewright_fmha.launch.kernel_args import args_of
from tilewright_fmha.launch.splits import (
    choose_splits,
    share_overhead,
    share_workgroups,
    shares_keys,
    tickets_of,
    work_items,
)
from tilewright_fmha.launch.tensor_maps import with_maps
from tilewright_fmha.pipelines.templates import nearest, templates_of
from tilewright_fmha.plan.backward import backward_parts
from tilewright_fmha.plan.scores import bias_stage, open_stage, reserve_lse, scores_stage
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import KV_APPEND, Family
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan, Stage, WorkspaceLayout
from tilewright_kit.types.arithmetic import ceil_div
from tilewright_kit.types.errors import UnsupportedError

__all__ = ["plan_fmha"]

ALIGNMENT = 256
"""Bytes that parts of the workspace are aligned to."""
STATUS_BYTES = 64
"""Counters of GPU kernels that tell what was wrong with lengths and pages, write lengths when all have read them, or
draw tiles. Behind them: a ticket for each tile of rows, where workgroups add up the parts of the keys
(``kFmhaTickets``), or take turns to add to dQ.
"""


def plan_fmha(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> ExecutionPlan:
    """One stage for most families; two for split keys (parts, then their sum) unless the kernel adds its parts itself,
    three for gradients. None if there is nothing to write. A bias together with slopes has a stage before these, and
    scores as an output one behind them. Heads that no
    kernel of a GPU holds have one for their scores, and one for each part of their values.
    """
    _check_template(config, device.arch)
    layout = WorkspaceLayout(ALIGNMENT)
    if problem.is_empty:
        return _plan(problem, device, (), layout)
    if device.arch.kind != "cpu" and not holds(config, problem):
        reserve_lse(problem, layout)
        stages = (*_by_parts(problem, config, device, layout), *scores_stage(problem, config, device, layout))
        return _plan(problem, device, stages, layout)
    before = bias_stage(problem, config, device, layout)
    reserve_lse(problem, layout)
    if config.family is Family.DQ_DK_DV:
        stages = backward_parts(problem, config, device, layout)
    elif config.family is Family.SPLITKV:
        stages = _split(problem, config, device, layout)
    elif config.family is Family.APPENDKV:
        stages = (_stage("append", problem, config, device, layout, k_tiles=problem.rotary_rows),)
    else:
        stages = (_forward("forward", problem, config, device, layout, 1),)
    stages = (*before, *stages, *scores_stage(problem, config, device, layout))
    return _plan(problem, device, stages, layout)


def _by_parts(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, layout: WorkspaceLayout) -> Iterator[Stage]:
    """Scores of heads that no kernel holds, and a stage for each part of the values."""
    for number, (first, part) in enumerate(value_parts(problem, config.hdim[1])):
        if number == 0:
            yield open_stage(problem, part, config, device, layout)
        yield _stage(f"values_{number}", part, config, device, layout, first_value=first)


def _split(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, layout: WorkspaceLayout) -> tuple[Stage, ...]:
    splits = choose_splits(problem, config, device)
    joins = tickets_of(config, device, splits) > 0
    if shares_keys(problem, config):
        rows = 2 * share_workgroups(problem, config, device) * config.m0
        layout.reserve(4 * rows * config.hdim[1], "o_acc")
        layout.reserve(4 * rows, "lse_acc")
        overhead = share_overhead(problem, config)
        return (_stage("split", problem, config, device, layout, splits=splits, split_rows=-overhead),)
    if splits == 1 and (joins or splits_tiles(config)):
        return (_forward("split", problem, config, device, layout, splits),)
    rows = splits * problem.heads_q * (problem.total_q if problem.varlen else problem.batch * problem.seq_q)
    layout.reserve(4 * rows * config.hdim[1], "o_acc")
    layout.reserve(4 * rows, "lse_acc")
    first = _forward("split", problem, config, device, layout, splits)
    if joins:
        return (first,)
    combine = combine_of(config, device.arch)
    return (first, _stage("combine", problem, combine, device, layout, splits=splits))


def _forward(
    name: str, problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, layout: WorkspaceLayout, splits: int
) -> Stage:
    nbytes = forward_bytes(problem, config, lanes_of(device.arch)) if device.arch.kind == "cpu" else 0
    if nbytes:
        layout.reserve(nbytes, "workspace")
    return _stage(name, problem, config, device, layout, splits=splits, workspace_bytes=nbytes)


def _stage(
    name: str, problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo, layout: WorkspaceLayout, **numbers: int
) -> Stage:
    rows = problem.seq_q * (problem.group if config.pack_gqa else 1)
    heads = problem.heads_k if config.pack_gqa else problem.heads_q
    q_tiles = ceil_div(rows, max(config.m0, 1))
    tiles = {
        "q_tiles": q_tiles,
        "k_tiles": ceil_div(problem.seq_k, max(config.n0, 1)),
        "tiles": problem.batch * heads * q_tiles * numbers.get("splits", 1),
    }
    geometry = launch_of(problem, config, device, numbers.get("splits", 1))
    counters = device.arch.kind != "cpu" and bool(_counter_bytes(problem, config, device))
    args = args_of(problem, parts=layout.offsets, counters=counters, **{**tiles, **numbers})
    if is_specialised(config):
        args = with_maps(problem, config, args)
    return Stage(name, config, "main", args, geometry)


def _counter_bytes(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> int:
    """Bytes of counters of a stage on a GPU."""
    splits = choose_splits(problem, config, device)
    tickets = tickets_of(config, device, splits) if splits > 1 or shares_keys(problem, config) else 0
    if tickets:
        return STATUS_BYTES + 4 * tickets * work_items(problem, config, device)
    if turns := turns_of(config, problem.batch * problem.heads_q, problem.seq_q):
        return STATUS_BYTES + 4 * turns
    tells = problem.has("status") or problem.has("seqlens_out")
    return STATUS_BYTES if tells or draws_tiles(config) else 0


def _plan(
    problem: FmhaProblem, device: DeviceInfo, stages: tuple[Stage, ...], layout: WorkspaceLayout
) -> ExecutionPlan:
    details: dict[str, object] = {"alignment": {"*": problem.alignment}}
    if problem.operation == KV_APPEND:
        pairs = [["k_cache", "k_past"], ["v_cache", "v_past"]]
        details["in_place"] = pairs + [["seqlens_out", "seqlens_k"]] * problem.has("seqlens_out")
    split = next((item for stage in stages if (item := _config_of(stage)).family is Family.SPLITKV), None)
    if split is not None:
        details["splits"] = choose_splits(problem, split, device)
    return ExecutionPlan(
        operation=problem.operation,
        arch=device.arch.id,
        operands=problem.operands,
        stages=stages,
        workspace_bytes=layout.bytes,
        flops=problem.flops,
        bytes_moved=problem.bytes_moved,
        counter_bytes=max((_counters_of(problem, stage, device) for stage in stages), default=0),
        details=details,
    )


def _counters_of(problem: FmhaProblem, stage: Stage, device: DeviceInfo) -> int:
    if device.arch.kind == "cpu":
        return 0
    return _counter_bytes(problem, _config_of(stage), device)


def _config_of(stage: Stage) -> FmhaConfig:
    assert isinstance(stage.config, FmhaConfig)
    return stage.config


def _check_template(config: FmhaConfig, arch: ArchSpec) -> None:
    """Kernels without a template have rules against them; nothing is planned for one that nobody asked."""
    if config.pipeline in templates_of(arch.kind, config.family):
        return
    other = nearest(config, arch.kind)
    raise UnsupportedError(
        f"there is no template of {config.family} by pipeline {config.pipeline} for {arch.kind} devices",
        field="config.pipeline" if other else "config.family",
        value=config.pipeline if other else config.family.value,
        rule="template_exists",
        fix=f"use {other.name}" if other else "use a device of another kind",
    )

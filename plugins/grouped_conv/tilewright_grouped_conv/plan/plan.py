"""From problem and kernel to stages: copies that the kernel needs, the kernel itself, copies of what it made.

The argument block of a CPU kernel is ``tw_conv_args`` of ``tilewright/core/args/conv.h``, field for field; a test
compares the two. The stages of a GPU are in ``launch``; ``pipelines.records`` says which.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewright_grouped_conv.candidates.applicability.tensors import needed_transforms
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import form_of
from tilewright_grouped_conv.footprint.cpu import padded_k, workspace_bytes
from tilewright_grouped_conv.launch.kernel_args import problem_row
from tilewright_grouped_conv.pipelines.records import pipeline_of
from tilewright_grouped_conv.problem.implicit_gemm import Phase
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.strided_copy.copies import Transform, copied, lowered_problem
from tilewright_grouped_conv.strided_copy.plan import transform_stage
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import (
    I64,
    WORKSPACE,
    ExecutionPlan,
    Geometry,
    Pointer,
    Stage,
    Struct,
    Table,
    WorkspaceLayout,
)
from tilewright_kit.contract.problem import Role
from tilewright_kit.tiles.footprint.cpu import slices
from tilewright_kit.tiles.footprint.workgroup import lanes
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["plan_conv"]

_ACC = Pointer("acc")
_RESULTS = {Direction.FORWARD: "y", Direction.BACKWARD_DATA: "dx", Direction.BACKWARD_WEIGHT: "dw"}


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    problem: ConvProblem
    """With copies in the place of what they stand for."""
    layout: WorkspaceLayout = field(default_factory=WorkspaceLayout)
    before: list[Stage] = field(default_factory=list)
    main: list[Stage] = field(default_factory=list)
    after: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    acc: Pointer = _ACC
    counter_bytes: int = 0


def plan_conv(problem: ConvProblem, config: ConvConfig, device: DeviceInfo) -> ExecutionPlan:
    """Stages: copies of operands, the convolution (with split-K on a CPU the slices, then their sum in a fixed order),
    copies of the result. None if nothing is to be written.
    """
    draft = _Draft(problem)
    if not problem.is_empty:
        for transform in needed_transforms(problem, config, device):
            _copy(draft, problem, transform, device)
        stages = pipeline_of(config, device.arch.kind).stages
        if stages is None:
            _cpu(draft, config, device)
        else:
            draft.main, draft.counter_bytes = stages(draft.problem, config, device, draft.layout, draft.acc)
    return ExecutionPlan(
        operation=problem.operation,
        arch=device.arch.id,
        operands=problem.operands,
        stages=(*draft.before, *draft.main, *draft.after),
        workspace_bytes=draft.layout.bytes,
        notes=tuple(draft.notes),
        flops=problem.flops,
        bytes_moved=problem.bytes_moved,
        details={"in_place": _in_place(problem), "alignment": _alignments(problem, config)},
        counter_bytes=draft.counter_bytes,
    )


def _copy(draft: _Draft, problem: ConvProblem, transform: Transform, device: DeviceInfo) -> None:
    copy = copied(problem, transform)
    offset = draft.layout.reserve(transform.nbytes)
    there, here = Pointer(transform.operand), Pointer(WORKSPACE, offset)
    draft.problem = lowered_problem(draft.problem, copy, offset)
    draft.notes.append(transform.reason)
    if not copy.is_output:
        draft.before.append(transform_stage(copy, there, here, device))
        return
    if problem.accumulate:
        # The addend lies as the result does, so it has a copy where the result has one.
        old = Pointer(WORKSPACE, draft.layout.reserve(transform.nbytes))
        draft.before.append(transform_stage(copy, draft.acc, old, device, name="transform_acc"))
        draft.acc = old
    draft.after.append(transform_stage(copy, here, there, device))


def _cpu(draft: _Draft, config: ConvConfig, device: DeviceInfo) -> None:
    problem = draft.problem
    phases = [phase for phase in problem.phases(config.channels_first) if phase.m and phase.n and phase.batch]
    split = _split(phases, config)
    if config.split_k > 1 and split != config.split_k:
        draft.notes.append(f"the reduction over {problem.k} gives {split} slices of whole tiles, not {config.split_k}")
    nbytes = workspace_bytes(config, phases, split, lanes(device.arch))
    scratch = Pointer(WORKSPACE, draft.layout.reserve(nbytes)) if nbytes else Pointer()
    rows = tuple(problem_row(problem, config, phase, acc=draft.acc) for phase in phases)
    args = Struct((Table(rows), I64(len(rows)), scratch, I64(nbytes), I64(split)))
    roles = ("partial", "reduce") if split > 1 else ("main",)
    draft.main = [Stage(role, config, role, args, Geometry(team=config.waves)) for role in roles] if rows else []


def _split(phases: list[Phase], config: ConvConfig) -> int:
    """Slices of the reduction that are not empty, of the phase that has most."""
    if config.direction is Direction.BACKWARD_WEIGHT and not config.is_matrix:
        # Loops over lines of pixels are cut between lines.
        lines = max((phase.k // max(phase.axes[2].rows, 1) for phase in phases), default=0)
        return slices(lines, config.split_k, 1)
    return max((slices(padded_k(phase, config), config.split_k, config.tile[2]) for phase in phases), default=1)


def _in_place(problem: ConvProblem) -> list[list[str]]:
    """(output, input) pairs that may be one tensor: an element of the input is read just before its own place in the
    output is written, and by nobody else.
    """
    output = next(item for item in problem.operands if item.role is Role.OUTPUT)
    names = [view.operand for view in problem.d] if problem.direction is Direction.FORWARD else ["acc"]
    return [
        [output.name, item.name]
        for item in problem.operands
        if item.role is Role.INPUT and item.name in names and item.desc == output.desc
    ]


def _alignments(problem: ConvProblem, config: ConvConfig) -> dict[str, int]:
    """Bytes of which every operand's address must be a multiple."""
    copied: set[str] = set()
    copy_bytes = form_of(config.pipeline).copy_bytes
    if copy_bytes:
        result = "" if config.epilogue is Epilogue.CSHUFFLE else _RESULTS[problem.direction]
        copied = {problem.image.operand, problem.filter.operand, problem.pixels.operand} - {result}
    return {item.name: copy_bytes if item.name in copied else DType(item.desc.dtype).bytes for item in problem.operands}

"""Stages of the strided copy: ``tw_transform_args`` of ``tilewright/core/args/strided_copy.h``; a test compares."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright_grouped_conv.problem.problem import TransformProblem
from tilewright_grouped_conv.strided_copy.config import TransformConfig
from tilewright_grouped_conv.strided_copy.copies import Lowered
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import I64, ExecutionPlan, Geometry, Pointer, Stage, Struct
from tilewright_kit.types.dtypes import DType

__all__ = ["plan_transform", "team_of", "transform_args", "transform_seconds", "transform_stage"]

_DIMS = 6
_SMALL_BYTES = 1 << 18
"""Copies below this stay with one thread: a team costs more than it saves."""
GPU_THREADS, GPU_TILE = 256, 32
"""``kTransformThreads`` and ``kTransformTile`` of ``tilewright/gpu/conv/strided_copy.hpp``."""


def plan_transform(problem: TransformProblem, config: TransformConfig, device: DeviceInfo) -> ExecutionPlan:
    """One stage, or none if there is nothing to write."""
    dims = (problem.sizes, problem.kept, problem.from_strides, problem.to_strides)
    args = transform_args(Pointer("x"), Pointer("out"), *dims)
    stage = Stage("main", config, "main", args, _geometry(args, problem.dtype_out, device))
    return ExecutionPlan(
        operation=problem.operation,
        arch=device.arch.id,
        operands=problem.operands,
        stages=() if problem.is_empty else (stage,),
        bytes_moved=problem.bytes_moved,
    )


def transform_stage(copy: Lowered, source: Pointer, target: Pointer, device: DeviceInfo, name: str = "") -> Stage:
    """A tensor into its copy, or (of an output) the copy back into the tensor; ``acc`` goes in."""
    transform = copy.transform
    operand = transform.operand.replace("[", "").replace("]", "")
    back = copy.is_output and target.operand == transform.operand
    config = TransformConfig(transform.dtype)
    sizes = copy.kept if back else copy.sizes
    strides = (copy.copy_strides, copy.strides) if back else (copy.strides, copy.copy_strides)
    args = transform_args(source, target, sizes, copy.kept, *strides)
    return Stage(name or f"transform_{operand}", config, "main", args, _geometry(args, transform.dtype, device))


def transform_args(
    source: Pointer,
    target: Pointer,
    sizes: Sequence[int],
    kept: Sequence[int],
    from_strides: Sequence[int],
    to_strides: Sequence[int],
) -> Struct:
    """The argument block. Dimensions are sorted by the destination's strides and, where they follow one another in both
    tensors, merged; the one that is fastest in the source comes last but one, unless it is the last.
    """
    order = sorted(range(len(sizes)), key=lambda dim: (sizes[dim] > 1, -to_strides[dim]))
    merged: list[tuple[int, int, int, int]] = []
    for dim in order:
        size, have, step, to = sizes[dim], kept[dim], from_strides[dim], to_strides[dim]
        if size == 1 and have == 1:
            continue
        if merged:
            outer = merged[-1]
            if have == size and outer[2] == step * size and outer[3] == to * size:
                merged[-1] = (outer[0] * size, outer[1] * size, step, to)
                continue
        merged.append((size, have, step, to))
    if not merged:
        merged.append((1, 1, 1, 1))
    others = merged[:-1]
    if others:
        nearest = min(range(len(others)), key=lambda dim: (others[dim][2] or 2**62, -dim))
        merged = [*others[:nearest], *others[nearest + 1 :], others[nearest], merged[-1]]
    merged = [(1, 1, 0, 0)] * (_DIMS - len(merged)) + merged
    wide, have_all, steps, goals = zip(*merged, strict=True)
    numbers = (*wide, *steps, *goals, *have_all)
    return Struct((source, target, *(I64(number) for number in numbers)))


def team_of(nbytes: int, device: DeviceInfo) -> int:
    """Threads for a copy of that many bytes."""
    return 1 if nbytes < _SMALL_BYTES else max(device.units, 1)


def transform_seconds(nbytes: int, device: DeviceInfo) -> float:
    """A copy of that many bytes, read and written: by memory's speed where the arch states it."""
    bandwidth = device.arch.throughput.memory_bytes_per_second or 3.0e10
    return 2 * nbytes / bandwidth + (1.0e-6 if device.arch.kind == "cpu" else 4.0e-6)


def _geometry(args: Struct, dtype: DType, device: DeviceInfo) -> Geometry:
    sizes = [int(item.value) for item in args.fields[2 : 2 + _DIMS] if isinstance(item, I64)]
    if device.arch.kind == "cpu":
        return Geometry(team=team_of(math.prod(sizes) * dtype.bytes, device))
    tiles = math.prod(sizes[:4]) * math.prod(-(-size // GPU_TILE) for size in sizes[4:])
    shared = GPU_TILE * (GPU_TILE + 1) * 4
    return Geometry(grid=(max(tiles, 1), 1, 1), block=(GPU_THREADS, 1, 1), shared_bytes=shared)

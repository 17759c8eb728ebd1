"""Problems and what is planned for them: parsing, candidates, plans, predictions."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.conformance.report import CheckReport, Skipped
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.plan import COUNTERS, WORKSPACE, Arg, ExecutionPlan, Pointer, Stage, Struct, Table, pack
from tilewright_kit.contract.problem import OperationRequest, Problem, Role
from tilewright_kit.selection.explain import explain
from tilewright_kit.selection.strategies import FirstFit, Heuristic
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["check_problems", "plan_findings", "samples_on"]

MAP_ALIGNMENT, MAX_BOX, MAX_PIXELS = 16, 256, 1024
"""Limits of the bulk copy engine: bytes, elements in each dimension of a box, and pixels that one copy gathers."""
PLANNED = 6
"""Candidates per sample that are planned: the first, the last and some between."""


def samples_on(
    operation: Operation[Any, Any], device: DeviceInfo
) -> Iterator[tuple[OperationRequest, Problem, Sequence[KernelConfig]]]:
    """The samples that the device can compute, with their problems and candidates."""
    for request in operation.samples():
        try:
            problem = operation.parse(request)
            candidates = operation.candidates(problem, device)
        except UnsupportedError:
            continue
        if candidates:
            yield request, problem, candidates


def check_problems(report: CheckReport, operation: Operation[Any, Any], devices: Sequence[DeviceInfo]) -> None:
    """Everything between a request and a plan, on each device."""
    report.run("samples.present", _samples, operation, devices)
    report.run("parse.equal", _problems, operation)
    report.run("parse.garbage", _garbage, operation)
    for device in devices:
        at = device.arch.id
        report.run(f"candidates.valid@{at}", _candidates, operation, device)
        report.run(f"candidates.deterministic@{at}", _same_candidates, operation, device)
        report.run(f"plan@{at}", _plans, operation, device)
        report.run(f"predict@{at}", _predictions, operation, device)
    if devices:
        report.run("explain", _explanations, operation, devices[0])


def _some(items: Sequence[KernelConfig]) -> Sequence[KernelConfig]:
    step = max(1, -(-len(items) // PLANNED))
    return list(dict.fromkeys([*items[::step], items[-1]]))


def _samples(operation: Operation[Any, Any], devices: Sequence[DeviceInfo]) -> Iterator[str]:
    requests = list(operation.samples())
    if not requests:
        yield "samples() is empty"
    if any(request.operation != operation.name for request in requests):
        yield "samples() has a request for another operation"
    if devices and not any(next(samples_on(operation, device), None) for device in devices):
        yield "no sample has a candidate on any device"


def _problems(operation: Operation[Any, Any]) -> Iterator[str]:
    for request in operation.samples():
        problem, again = operation.parse(request), operation.parse(request)
        if problem != again or hash(problem) != hash(again) or problem.signature != again.signature:
            yield f"parsing {_label(request)} twice gives problems that differ or hash differently"
        hash(problem.signature)
        json.dumps(problem.describe(), allow_nan=False)
        names = [operand.name for operand in problem.operands]
        if len(set(names)) < len(names) or WORKSPACE in names:
            yield f"the operands of {_label(request)} share a name, or use a reserved one: {names}"
        for operand in problem.operands:
            operand.desc.check(operand.name)
        if problem.flops < 0 or problem.bytes_moved < 0:
            yield f"{_label(request)} has negative work"


def _garbage(operation: Operation[Any, Any]) -> Iterator[str]:
    for request in operation.samples():
        for what, damaged in _damaged(request):
            if finding := _refusal_finding(operation, damaged):
                yield f"{what}: {finding}"


def _refusal_finding(operation: Operation[Any, Any], request: OperationRequest) -> str:
    """The fault in how a request that may be garbage is parsed; empty if there is none."""
    try:
        operation.parse(request)
    except (InvalidArgumentError, UnsupportedError) as error:
        return "" if error.reason else "refused without a reason"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return ""


def _damaged(request: OperationRequest) -> Iterator[tuple[str, OperationRequest]]:
    """Requests that a careless or hostile client may send. Some may still be legal."""
    replace = dataclasses.replace
    yield "no tensors", replace(request, inputs={}, outputs={})
    yield "unknown attribute", replace(request, attributes={**request.attributes, "no_such_attribute": 1})
    for side in ("inputs", "outputs"):
        tensors: Mapping[str, TensorDesc] = getattr(request, side)
        yield (
            f"unknown tensor in {side}",
            replace(request, **{side: {**tensors, "no_such_tensor": TensorDesc.of("fp32", (1,))}}),
        )
        for name in tensors:
            left = {key: value for key, value in tensors.items() if key != name}
            yield f"{side}.{name} missing", replace(request, **{side: left})
            for what, desc in _damaged_tensors(tensors[name]):
                yield f"{side}.{name} {what}", replace(request, **{side: {**tensors, name: desc}})
    for name in request.attributes:
        values: tuple[Any, ...] = ("", "no such word", -1, 0, 2**70, math.nan, math.inf, True, (), (1, -1), ("x",))
        for value in values:
            yield f"attribute {name}={value!r}", replace(request, attributes={**request.attributes, name: value})


def _damaged_tensors(desc: TensorDesc) -> Iterator[tuple[str, TensorDesc]]:
    shape, strides = desc.shape, desc.strides
    yield "of rank 0", TensorDesc(desc.dtype, (), ())
    yield "of one rank more", TensorDesc(desc.dtype, (2, *shape), (1, *strides))
    yield "of rank 9", TensorDesc(desc.dtype, (1,) * 9, (1,) * 9)
    yield "without strides", TensorDesc(desc.dtype, shape, ())
    yield "in an unknown packing", TensorDesc(desc.dtype, shape, strides, "no such packing", 1)
    for axis, size in enumerate(shape):
        for other in (0, size + 1, -1, 2**62):
            yield f"with size {other}", TensorDesc(desc.dtype, (*shape[:axis], other, *shape[axis + 1 :]), strides)
        for other in (-1, 0, 2**62):
            changed = (*strides[:axis], other, *strides[axis + 1 :])
            yield f"with stride {other}", TensorDesc(desc.dtype, shape, changed)
    for dtype in DType:
        yield f"of type {dtype}", TensorDesc(dtype, shape, strides)


def _candidates(operation: Operation[Any, Any], device: DeviceInfo) -> Iterator[str]:
    count = 0
    for request, problem, candidates in samples_on(operation, device):
        count += 1
        if len(set(candidates)) < len(candidates):
            yield f"{_label(request)} has a candidate twice"
        for config in candidates:
            for violation in operation.rules.check(config, device.arch):
                yield f"candidate {config.name} is not valid: {violation.reason}"
            for violation in operation.mismatches(problem, config, device):
                yield f"candidate {config.name} cannot compute {_label(request)}: {violation.reason}"
    if not count:
        raise Skipped("no sample has a candidate here")


def _same_candidates(operation: Operation[Any, Any], device: DeviceInfo) -> Iterator[str]:
    for request in operation.samples():
        problem = operation.parse(request)
        try:
            runs = [tuple(operation.candidates(problem, device)) for _ in range(3)]
        except UnsupportedError:
            continue
        runs.append(tuple(operation.candidates(operation.parse(request), device)))
        if any(run != runs[0] for run in runs):
            yield f"candidates of {_label(request)} differ from call to call"


def _plans(operation: Operation[Any, Any], device: DeviceInfo) -> Iterator[str]:
    count = 0
    for request, problem, candidates in samples_on(operation, device):
        for config in _some(candidates):
            count += 1
            for finding in plan_findings(operation, problem, config, device):
                yield f"{_label(request)} with {config.name}: {finding}"
    if not count:
        raise Skipped("no sample has a candidate here")


def plan_findings(
    operation: Operation[Any, Any], problem: Problem, config: KernelConfig, device: DeviceInfo
) -> Iterator[str]:
    """Faults of the plan of one kernel for one problem."""
    plan = operation.plan(problem, config, device)
    if plan != operation.plan(problem, config, device):
        yield "planning twice gives two plans"
    if (plan.operation, plan.arch) != (operation.name, device.arch.id):
        yield f"it is a plan of {plan.operation} for {plan.arch}"
    if {item.name for item in plan.operands} != {item.name for item in problem.operands}:
        yield "its operands are not those of the problem"
    if not plan.stages and not problem.is_empty:
        yield "it has no stages, but the problem has something to write"
    record = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    types = {stage.config.operation: type(stage.config) for stage in plan.stages}
    if ExecutionPlan.from_dict(record, types).to_dict() != record:
        yield "it comes back as another plan from its dict"
    yield from _stages(operation, plan, device)
    written = {pointer.operand for stage in plan.stages for pointer in _pointers(stage.args)}
    for item in plan.operands:
        if plan.stages and item.role is Role.OUTPUT and item.desc.size and item.name not in written:
            yield f"no stage is given the output {item.name!r}"


def _stages(operation: Operation[Any, Any], plan: ExecutionPlan, device: DeviceInfo) -> Iterator[str]:
    sizes = {item.name: item.desc.nbytes for item in plan.operands}
    sizes |= {WORKSPACE: plan.workspace_bytes, COUNTERS: plan.counter_bytes}
    for stage in plan.stages:
        for pointer in _pointers(stage.args):
            if pointer.operand not in sizes:
                yield f"stage {stage.name!r} points to {pointer.operand!r}, which is no operand"
            elif not 0 <= pointer.offset <= sizes[pointer.operand]:
                yield f"stage {stage.name!r} points outside of {pointer.operand!r}"
            elif pointer.operand in (WORKSPACE, COUNTERS) and sizes[pointer.operand] == 0:
                yield f"stage {stage.name!r} points to the {pointer.operand}, but the plan asks for none"
        yield from _maps(stage, plan)
        packed = pack(stage.args)
        block = bytearray(len(packed.template))
        packed.bind(dict.fromkeys(sizes, 2**40), block, base=2**41)
        geometry = stage.geometry
        counts = (geometry.team, *geometry.grid, *geometry.block, *geometry.cluster)
        if min(counts) < 1 or geometry.shared_bytes < 0:
            yield f"stage {stage.name!r} is launched on nothing: {geometry}"
        elif any(size % share for size, share in zip(geometry.grid, geometry.cluster, strict=True)):
            yield f"stage {stage.name!r} has a grid that is not made of whole clusters: {geometry}"
        if isinstance(stage.config, operation.config_type):
            if not operation.rules.allows(stage.config, device.arch):
                yield f"stage {stage.name!r} uses an invalid kernel, {stage.config.name}"
            try:
                entries = operation.generate(stage.config, device.arch).entries
            except UnsupportedError:
                continue
            if stage.role not in entries:
                yield f"stage {stage.name!r} calls entry {stage.role!r}, but the source has {sorted(entries)}"


def _maps(stage: Stage, plan: ExecutionPlan) -> Iterator[str]:
    """Faults of the tensor maps of a stage, by the rules of the copy engine and the operands' sizes."""
    sizes = {item.name: item.desc.nbytes for item in plan.operands} | {WORKSPACE: plan.workspace_bytes}
    for _, item in pack(stage.args).maps:
        where = f"the tensor map of {item.operand!r} in stage {stage.name!r}"
        if item.operand not in sizes:
            yield f"{where} is of no operand"
            continue
        size = DType(item.dtype).bytes
        sizes_in_memory, begin = item.sizes, item.offset
        if begin < 0 and item.strides[:1] == item.strides[1:] and begin == -item.sizes[1] * item.strides[0]:
            # Rows are shown twice: those that copies reach are those of dimension 2 behind the first of dimension 1.
            sizes_in_memory, begin = (item.sizes[0], 1, item.sizes[2] - item.sizes[1]), 0
        last = begin + sum((n - 1) * s for n, s in zip(sizes_in_memory, (size, *item.strides), strict=True)) + size
        if min(item.sizes) < 1 or begin < 0 or last > sizes[item.operand]:
            yield f"{where} reaches outside of it"
        if item.offset % MAP_ALIGNMENT or any(stride % MAP_ALIGNMENT for stride in item.strides):
            yield f"{where} has an offset or strides that are not multiples of {MAP_ALIGNMENT}"
        rank, most = (len(item.sizes), MAX_BOX) if item.walk is None else (2, MAX_PIXELS)
        if len(item.box) != rank or not all(1 <= edge <= most for edge in item.box):
            yield f"{where} has a box that the engine does not take: {item.box}"
        if item.swizzle and item.box[0] * size != item.swizzle:
            yield f"{where} has rows of {item.box[0] * size} bytes, swizzled over {item.swizzle}"


def _pointers(arg: Arg) -> Iterator[Pointer]:
    if isinstance(arg, Pointer) and arg.operand:
        yield arg
    elif isinstance(arg, (Struct, Table)):
        for item in arg.fields if isinstance(arg, Struct) else arg.rows:
            yield from _pointers(item)


def _predictions(operation: Operation[Any, Any], device: DeviceInfo) -> Iterator[str]:
    for request, problem, candidates in samples_on(operation, device):
        for config in _some(candidates):
            first, again = (operation.predict(problem, config, device) for _ in range(2))
            if not (math.isfinite(first.seconds) and first.seconds > 0):
                yield f"{_label(request)} with {config.name} is predicted to take {first.seconds} s"
            if first != again:
                yield f"two predictions of {config.name} differ"


def _explanations(operation: Operation[Any, Any], device: DeviceInfo) -> Iterator[str]:
    for request, problem, candidates in samples_on(operation, device):
        for strategy in (FirstFit(), Heuristic()):
            explanation = explain(operation, problem, device, strategy, limit=100)
            json.dumps(explanation.to_dict(), allow_nan=False)
            if len(explanation.candidates) != len(candidates) or explanation.chosen is None:
                yield f"explaining {_label(request)} with {strategy.name} loses candidates"
        return


def _label(request: OperationRequest) -> str:
    return ", ".join(f"{name} {desc.dtype}{list(desc.shape)}" for name, desc in request.inputs.items())

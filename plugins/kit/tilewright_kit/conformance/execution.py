"""Building and running the samples, and the reference that their results are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_kit.conformance.problems import samples_on
from tilewright_kit.conformance.report import CheckReport, Skipped
from tilewright_kit.contract.abilities import SamplesInputs
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import OperationRequest, Problem, Role
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import UnsupportedError

__all__ = ["Build", "Execute", "check_execution", "draw_inputs"]

Array = npt.NDArray[Any]
Build = Callable[[SourceUnit, ArchSpec], object]
"""``build(unit, arch)`` compiles a unit and raises if it cannot."""
Execute = Callable[[Operation[Any, Any], OperationRequest, dict[str, Array]], Mapping[str, Array]]
"""``execute(operation, request, inputs)`` computes a request on the device and returns its outputs by name."""


def check_execution(
    report: CheckReport,
    operation: Operation[Any, Any],
    device: DeviceInfo,
    build: Build | None,
    run: Execute | None,
    seed: int,
) -> None:
    """The reference of every sample, and, where callbacks are given, its kernels and results."""
    report.run("reference", _references, operation, device, seed)
    report.run("build", _builds, operation, device, build)
    report.run("run", _runs, operation, device, run, seed)


def draw_inputs(
    operation: Operation[Any, Any], request: OperationRequest, problem: Problem, seed: int
) -> dict[str, Array]:
    """Inputs of a sample, with mean zero, the same for the same seed.

    Inputs that must make sense (lengths, indices) come from an operation that ``SamplesInputs``; the others are drawn
    here. Raises ``Skipped`` for packed inputs that it does not give.
    """
    rng = np.random.default_rng(seed)
    meant = operation.sample_inputs(request, rng) if isinstance(operation, SamplesInputs) else {}
    given: dict[str, Array] = dict(meant)
    for operand in problem.operands:
        if operand.role is not Role.INPUT or operand.name in given:
            continue
        if operand.desc.packing:
            raise Skipped(f"the sample's input {operand.name} is packed")
        given[operand.name] = _draw(rng, operand.desc.dtype, operand.desc.shape)
    return given


def _draw(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> Array:
    if not dtype.is_float:
        return rng.integers(-5, 6, shape).astype(dtype.numpy)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype.numpy)


def _references(operation: Operation[Any, Any], device: DeviceInfo, seed: int) -> Iterator[str]:
    for request, problem, _ in samples_on(operation, device):
        inputs = draw_inputs(operation, request, problem, seed)
        copies = {name: array.copy() for name, array in inputs.items()}
        outputs = operation.reference(problem, inputs)
        for name, array in copies.items():
            if array.tobytes() != inputs[name].tobytes():
                yield f"reference() writes to its input {name}"
        for operand in problem.operands:
            if operand.role is Role.OUTPUT:
                truth = outputs.get(operand.name)
                if truth is None or truth.shape != operand.desc.shape:
                    yield f"reference() gives {operand.name} {None if truth is None else truth.shape}"
                elif truth.dtype.kind not in "iu" and truth.dtype != np.float64:
                    yield f"reference() gives {operand.name} in {truth.dtype}, not in float64 or integers"


def _builds(operation: Operation[Any, Any], device: DeviceInfo, build: Build | None) -> Iterator[str]:
    if build is None:
        raise Skipped("no build callback was given")
    built = set()
    for _, problem, candidates in samples_on(operation, device):
        for config in operation.plan(problem, candidates[0], device).kernels:
            if config in built or not isinstance(config, operation.config_type):
                continue
            built.add(config)
            try:
                unit = operation.generate(config, device.arch)
            except UnsupportedError:
                continue
            try:
                build(unit, device.arch)
            except Exception as error:
                yield f"{config.name} does not build: {error}"
    if not built:
        raise Skipped("no sample has a kernel here")


def _runs(operation: Operation[Any, Any], device: DeviceInfo, run: Execute | None, seed: int) -> Iterator[str]:
    if run is None:
        raise Skipped("no run callback was given")
    for request, problem, _ in samples_on(operation, device):
        inputs = draw_inputs(operation, request, problem, seed)
        truth = operation.reference(problem, inputs)
        outputs = run(operation, request, inputs)
        for operand in problem.operands:
            if operand.role is Role.OUTPUT:
                if operand.name not in outputs:
                    yield f"the executor returned no {operand.name}"
                    continue
                terms = problem.flops // (2 * max(1, operand.desc.size))
                result = compare(outputs[operand.name], truth[operand.name], operand.desc.dtype, max(1, terms))
                if not result.passed:
                    shapes = {name: list(desc.shape) for name, desc in request.inputs.items()}
                    yield f"{operand.name} of {shapes}: {result}"

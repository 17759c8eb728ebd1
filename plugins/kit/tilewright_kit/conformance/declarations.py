"""Checks that an operation takes and refuses what it declares: operands, attributes, defaults, bounds and choices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tilewright_kit.conformance.report import CheckReport, Skipped
from tilewright_kit.contract.abilities import Declared
from tilewright_kit.contract.declaration import AttributeSpec, Declaration, OperandSpec, ValueType
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Attribute, OperationRequest, Problem, Role
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError, TilewrightError, UnsupportedError
from tilewright_kit.types.tensor import MAX_RANK, TensorDesc

__all__ = ["check_declarations"]

NO_WORD = "no such word"
TRIED = 3
"""Requests that each operand is changed in."""


def check_declarations(report: CheckReport, operation: Operation[Any, Any], devices: Sequence[DeviceInfo]) -> None:
    """Compare the declaration with what ``parse`` does."""
    report.run("declaration.samples", _samples, operation)
    report.run("declaration.examples", _examples, operation)
    report.run("declaration.attributes", _attributes, operation)
    report.run("declaration.operands", _operands, operation, devices)


def _declaration(operation: Any) -> Declaration:
    if not isinstance(operation, Declared):
        raise Skipped("the operation declares nothing")
    return operation.declaration


def _requests(operation: Operation[Any, Any]) -> list[OperationRequest]:
    return [*operation.samples(), *(item.request for item in _declaration(operation).examples)]


def _samples(operation: Operation[Any, Any]) -> Iterator[str]:
    """All that requests give, and all operands of their problems, are declared."""
    declaration = _declaration(operation)
    known = {spec.name: spec for spec in declaration.operands}
    attributes = {spec.name for spec in declaration.attributes}
    if len(known) != len(declaration.operands) or len(attributes) != len(declaration.attributes):
        yield "a name is declared twice"
    for request in _requests(operation):
        if unknown := set(request.attributes) - attributes:
            yield f"attributes {sorted(unknown)} are not declared"
        problem = operation.parse(request)
        given = {base_of(item.name) for item in problem.operands}
        missing = [spec.name for spec in declaration.operands if not spec.optional and spec.name not in given]
        if missing:
            yield f"{missing} are not there, but not declared optional"
        for item in problem.operands:
            spec = known.get(base_of(item.name))
            if spec is None or spec.role is not item.role:
                yield f"{item.role.value} {item.name} is not declared"
            elif item.desc.dtype not in spec.dtypes:
                yield f"{item.name} is {item.desc.dtype}, which is not declared"
            elif not spec.ranks[0] <= len(item.desc.shape) <= spec.ranks[1]:
                yield f"{item.name} has {len(item.desc.shape)} dimensions, which is not declared"


def base_of(name: str) -> str:
    """The name without the numbers of lists and groups."""
    return name.partition("[")[0]


def _examples(operation: Operation[Any, Any]) -> Iterator[str]:
    declaration = _declaration(operation)
    if not declaration.examples:
        yield "there is no example"
    for example in declaration.examples:
        if example.request.operation != operation.name:
            yield f"{example.title!r} is of another operation"


# ---- attributes ----


def _attributes(operation: Operation[Any, Any]) -> Iterator[str]:
    requests = _requests(operation)
    for spec in _declaration(operation).attributes:
        for request in requests:
            if spec.name not in request.attributes:
                yield from _default_findings(operation, request, spec)
            yield from _bound_findings(operation, request, spec)
            yield from _choice_findings(operation, request, spec)
            wrong = next((value for kind, value in _WRONG if kind not in spec.types), None)
            if wrong is not None and _refused(operation, request, spec, wrong) is None:
                yield f"{spec.name} takes {wrong!r}, whose type is not declared"


_WRONG: tuple[tuple[ValueType, Attribute], ...] = ((ValueType.FLAG, True), (ValueType.TEXT, NO_WORD))


def _default_findings(operation: Operation[Any, Any], request: OperationRequest, spec: AttributeSpec) -> Iterator[str]:
    if spec.default is None:
        if not spec.absent:
            yield f"{spec.name} has neither a default nor a meaning of its absence"
    elif (error := _refused(operation, request, spec, spec.default)) is not None:
        yield f"the default of {spec.name} is refused: {error.reason}"
    elif _with(operation, request, spec, spec.default) != operation.parse(request):
        yield f"leaving {spec.name} out is not giving {spec.default!r}"


def _bound_findings(operation: Operation[Any, Any], request: OperationRequest, spec: AttributeSpec) -> Iterator[str]:
    for bound, step in ((spec.lowest, -1), (spec.highest, 1)):
        if bound is None or abs(bound) >= 2**63 - 1:
            continue
        beyond: Attribute = bound + step
        error = _refused(operation, request, spec, beyond)
        if error is None:
            yield f"{spec.name} takes {beyond}, beyond its bounds"
        elif not error.field.startswith(f"attributes.{spec.name}"):
            yield f"{spec.name}={beyond} is refused as {error.field}"
    if ValueType.NUMBER in spec.types and _refused(operation, request, spec, math.nan) is None:
        yield f"{spec.name} takes NaN"


def _choice_findings(operation: Operation[Any, Any], request: OperationRequest, spec: AttributeSpec) -> Iterator[str]:
    if not spec.choices:
        return
    refused = _refused(operation, request, spec, NO_WORD)
    if refused is None:
        yield f"{spec.name} takes {NO_WORD!r}"
        return
    if refused.field != f"attributes.{spec.name}":
        yield f"{spec.name}={NO_WORD!r} is refused as {refused.field}"
    for choice in (*spec.choices, *spec.aliases):
        error = _refused(operation, request, spec, choice)
        if error is not None and error.rule == refused.rule and error.field == refused.field:
            yield f"{spec.name} refuses {choice!r}, which is declared"
    for alias, choice in spec.aliases.items():
        if choice not in spec.choices:
            yield f"{spec.name}: {alias!r} stands for {choice!r}, which is not declared"


def _with(operation: Operation[Any, Any], request: OperationRequest, spec: AttributeSpec, value: Attribute) -> Problem:
    changed = dataclasses.replace(request, attributes={**request.attributes, spec.name: value})
    problem: Problem = operation.parse(changed)
    return problem


def _refused(
    operation: Operation[Any, Any], request: OperationRequest, spec: AttributeSpec, value: Attribute
) -> TilewrightError | None:
    try:
        _with(operation, request, spec, value)
    except (InvalidArgumentError, UnsupportedError) as error:
        return error
    return None


# ---- operands ----


def _operands(operation: Operation[Any, Any], devices: Sequence[DeviceInfo]) -> Iterator[str]:
    requests = _requests(operation)
    for spec in _declaration(operation).of_role(Role.INPUT):
        having = [request for request in requests if any(base_of(name) == spec.name for name in request.inputs)]
        if not having:
            yield f"no sample or example has {spec.name}"
        for request in having[:TRIED]:
            names = [name for name in request.inputs if base_of(name) == spec.name]
            left = {name: desc for name, desc in request.inputs.items() if name not in names}
            if not spec.optional and _computed(operation, dataclasses.replace(request, inputs=left), devices):
                yield f"{spec.name} may be left out, but is not declared optional"
            yield from _tensor_findings(operation, request, names[0], spec, devices)


def _tensor_findings(
    operation: Operation[Any, Any],
    request: OperationRequest,
    name: str,
    spec: OperandSpec,
    devices: Sequence[DeviceInfo],
) -> Iterator[str]:
    desc = request.inputs[name]
    others = [TensorDesc(dtype, desc.shape, desc.strides) for dtype in DType if dtype not in spec.dtypes]
    others += [TensorDesc.of(desc.dtype, (1,) * rank) for rank in range(spec.ranks[0])]
    others += [TensorDesc.of(desc.dtype, (1,) * rank) for rank in range(spec.ranks[1] + 1, MAX_RANK + 1)]
    for other in others:
        changed = dataclasses.replace(request, inputs={**request.inputs, name: other})
        if _computed(operation, changed, devices):
            yield f"{name} may be {other.dtype} {list(other.shape)}, which is not declared"


def _computed(operation: Operation[Any, Any], request: OperationRequest, devices: Sequence[DeviceInfo]) -> bool:
    """Some device has a kernel for the request."""
    try:
        problem = operation.parse(request)
    except (InvalidArgumentError, UnsupportedError):
        return False
    return any(_has_kernel(operation, problem, device) for device in devices)


def _has_kernel(operation: Operation[Any, Any], problem: Problem, device: DeviceInfo) -> bool:
    try:
        return bool(operation.candidates(problem, device))
    except UnsupportedError:
        return False

"""Requests of the generic calls: which operands, how a kernel is chosen, and how a call keeps its memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from tilewright.dispatch.operands.operands import Cargo
from tilewright.errors import InvalidArgumentError, TilewrightError, is_unfinished
from tilewright.session.state import Core, Session
from tilewright.tensor.interop import DeviceTensor, recognise
from tilewright.tensor.resident import ResidentTensor
from tilewright.transport.rpc import Flow, Rpc, Work
from tilewright.types.addresses import address_of
from tilewright.types.arguments import check_name
from tilewright.types.dtypes import element_type
from tilewright.types.spec import Array, Spec, as_array, dense, element_strides, span_bytes
from tilewright_proto.v1 import dispatch_pb2, tensor_pb2

__all__ = [
    "BuildPolicy",
    "as_operand",
    "check_choice",
    "config_text",
    "held",
    "named_operands",
    "plan_request",
    "planned_input",
    "planned_output",
    "refuse_outputs",
    "selection",
    "spec_of",
]

BuildPolicy = Literal["wait", "fallback"]
_POLICIES = {"wait": dispatch_pb2.BUILD_WAIT, "fallback": dispatch_pb2.BUILD_FALLBACK}


def selection(
    kernel: str | None, strategy: str | None, build: BuildPolicy, device: str | None, config: str = ""
) -> dispatch_pb2.Selection:
    """Choice of a kernel; naming one implies the strategy ``explicit``, and so does its configuration as JSON. Raises
    ``InvalidArgumentError``.
    """
    check_choice(kernel, strategy, build, device, config)
    return dispatch_pb2.Selection(
        strategy=strategy or ("explicit" if kernel or config else ""),
        kernel=kernel or "",
        build=_POLICIES[build],
        device=device or "",
        config_json=config,
    )


def config_text(config: Mapping[str, Any] | None, field: str = "config") -> str:
    """A kernel's configuration as JSON; empty for none. Raises ``InvalidArgumentError``."""
    if config is None:
        return ""
    try:
        if not isinstance(config, Mapping):
            raise TypeError("it is no mapping")
        return json.dumps(dict(config), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{field} is not the configuration of a kernel: {error}",
            field=field,
            value=config,
            rule="config_json",
            fix="give a dict of fields and plain values, as client.kernels.describe(name).config is one",
        ) from None


def check_choice(
    kernel: str | None, strategy: str | None, build: BuildPolicy, device: str | None, config: str = ""
) -> None:
    """Raise ``InvalidArgumentError`` for words that cannot choose a kernel."""
    if not isinstance(build, str) or build not in _POLICIES:
        raise InvalidArgumentError(
            "there is no such build policy", field="build", value=build, rule="build_policy", fix="use wait or fallback"
        )
    for field, value in (("kernel", kernel), ("strategy", strategy), ("device", device)):
        check_name(field, value)
        if config and value and field != "device":
            raise InvalidArgumentError(
                f"config and {field} both choose the kernel",
                field=field,
                value=value,
                rule="explicit_kernel",
                fix="leave one of them out",
            )


def spec_of(value: Any, field: str) -> Spec:
    """The description of an array, a resident tensor, a ``Spec``, or ``(shape, dtype)``."""
    if isinstance(value, Spec):
        return value
    if isinstance(value, ResidentTensor):
        return value.spec
    if (tensor := recognise(value, field)) is not None:
        return tensor.spec
    if (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], (tuple, list))
        and not isinstance(value[1], (tuple, list))
    ):
        return Spec.of(value[0], element_type(value[1], field))
    return Spec.of_array(as_array(value, field), field)


def as_operand(value: Any, field: str) -> Any:
    """``value`` with a description: a device tensor or a resident one as it is, else an array."""
    return value if isinstance(value, (DeviceTensor, ResidentTensor)) else as_array(value, field)


def planned_input(core: Core, value: Any, field: str) -> Spec:
    """Description of an input as a plan takes it best: as it lies in shared memory, on a device or in a resident
    buffer; an array elsewhere as its copy without gaps.
    """
    if isinstance(value, (DeviceTensor, ResidentTensor)):
        return value.spec
    if (known := core.described(value)) is not None:
        return known
    if _in_place(core, value):
        return Spec.of_array(value, field)
    return Spec.of(value.shape, value.dtype, dense(value)[1] if value.size else None)


def planned_output(core: Core, value: Any, field: str) -> Spec:
    """Description of an output that was given: as it lies where it can be written in place, else contiguous."""
    if not isinstance(value, np.ndarray):
        return spec_of(value, field)
    if (known := core.described(value)) is not None:
        return known
    return Spec.of_array(value, field) if _in_place(core, value) else Spec(value.shape, value.dtype)


def _in_place(core: Core, array: Array) -> bool:
    if not array.size or element_strides(array) is None:
        return False
    return core.pool.find(address_of(array), span_bytes(array)) is not None


def plan_request(
    session: Session,
    operation: str,
    inputs: Mapping[str, Spec],
    outputs: Mapping[str, Spec],
    attributes: Mapping[str, tensor_pb2.Attribute],
    choice: dispatch_pb2.Selection,
) -> dispatch_pb2.PlanRequest:
    return dispatch_pb2.PlanRequest(
        session=session.token,
        operation=operation,
        inputs=named_operands(inputs),
        outputs=named_operands(outputs),
        attributes=attributes,
        selection=choice,
    )


def named_operands(specs: Mapping[str, Spec]) -> list[tensor_pb2.Operand]:
    return [tensor_pb2.Operand(name=name, spec=spec.to_wire(name)) for name, spec in specs.items()]


def refuse_outputs(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``InvalidArgumentError`` if an output was given that there is not."""
    names = list(known)
    for name in given:
        if name not in names:
            raise InvalidArgumentError(
                f"{what} has no output {name!r} here",
                field=f"outputs.{name}",
                value=name,
                rule="output_known",
                fix=f"use one of {', '.join(names)}",
            )


def held(core: Core, cargo: Cargo, call: Rpc) -> Flow[Any]:
    """Make a call that reads and writes the cargo's memory. If it is given up half-way the server may still be at it,
    so the memory is kept.
    """
    try:
        if cargo.tensors:
            yield Work(cargo.fence)
        return (yield call)
    except TilewrightError as error:
        if is_unfinished(error):
            core.quarantine(cargo)
        raise
    except BaseException:  # interrupted or cancelled while waiting
        core.quarantine(cargo)
        raise

"""The generic calls: run an operation, explain a choice. Every named operation of this library is arguments for
these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from tilewright.dispatch.operands import Cargo, attributes_to_wire, collect, place_input, place_output
from tilewright.errors import UNFINISHED, InvalidArgumentError, TilewrightError
from tilewright.session.state import Core, Session, check_timeout
from tilewright.tensor.export import device_for
from tilewright.tensor.interop import DeviceTensor, recognise
from tilewright.tensor.resident import ResidentTensor
from tilewright.transport import rpc as steps
from tilewright.transport.rpc import Flow, Rpc, Work
from tilewright.types.arguments import check_name
from tilewright.types.dtypes import element_type
from tilewright.types.report import Report
from tilewright.types.spec import Array, Spec, as_array
from tilewright_proto.v1 import dispatch_pb2, kernels_pb2, tensor_pb2

__all__ = [
    "BuildPolicy",
    "explain",
    "held",
    "plan_request",
    "refuse_outputs",
    "run",
    "selection",
    "spec_of",
]

BuildPolicy = Literal["wait", "fallback"]
_POLICIES = {"wait": dispatch_pb2.BUILD_WAIT, "fallback": dispatch_pb2.BUILD_FALLBACK}


def run(
    core: Core,
    operation: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Array | ResidentTensor | Spec | None] | None = None,
    attributes: Mapping[str, Any] | None = None,
    *,
    kernel: str | None = None,
    strategy: str | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
) -> Flow[dict[str, Any]]:
    """Run any operation of the server.

    ``inputs`` maps operand names to arrays (or resident tensors); list members are named ``d[0]``, ``d[1]``, ...
    ``outputs`` maps names to what is to be written: an array, a resident tensor, a ``Spec`` (a fresh array), or
    ``None`` (a fresh array of the inferred shape); left out, the operation's outputs are all inferred. Returns the
    outputs by name; packed ones as ``PackedTensor``.

    Arrays from ``empty``, ``zeros`` and ``asarray``, and views of them, are used in place, and so are arrays in memory
    of a GPU that the server runs (PyTorch, CuPy, JAX, anything with DLPack or ``__cuda_array_interface__``); others
    are copied. On GPU memory the operation runs in the order of the current stream and may return before it is done,
    as PyTorch's own do.

    ``kernel`` names a kernel, ``strategy`` the way to choose one, ``device`` where to run. ``build="fallback"`` runs
    the best kernel that is built while a better one is being built. ``timeout`` is in seconds, all steps of this call
    together being one or two requests.

    Raises ``InvalidArgumentError``, ``UnsupportedError``, ``NotFoundError`` (operation, kernel, device),
    ``BuildFailedError``, ``ToolchainMissingError``, ``ResourceExhaustedError``, ``DeadlineError``,
    ``UnavailableError``.

        >>> result = client.run("gemm", {"a": a, "b": b}, attributes={"alpha": 2.0})  # doctest: +SKIP
        >>> result["out"]  # doctest: +SKIP
    """
    limit = check_timeout(timeout) or core.timeout
    session = core.require()
    wanted = dict(outputs or {})
    inputs = {name: recognise(value, name) or value for name, value in inputs.items()}
    if any(isinstance(value, DeviceTensor) for value in inputs.values()):
        from tilewright.dispatch.planned_run import run_planned  # plans are made of this module

        device = device or device_for(session, inputs)
        done = yield from run_planned(
            core,
            operation,
            {name: as_operand(value, name) for name, value in inputs.items()},
            wanted,
            attributes or {},
            kernel=kernel,
            strategy=strategy,
            build=build,
            device=device,
            timeout=limit,
        )
        if done is not None:
            return done
    choice = selection(kernel, strategy, build, device)
    wire_attributes = attributes_to_wire(attributes or {})
    if not wanted or any(value is None for value in wanted.values()):
        specs = {name: spec_of(value, name) for name, value in inputs.items()}
        inferred = yield from _infer(core, session, operation, specs, wanted, wire_attributes, choice, limit)
        wanted = {**inferred, **{name: value for name, value in wanted.items() if value is not None}}
    cargo = Cargo(session)
    request = dispatch_pb2.RunRequest(
        session=session.token, operation=operation, attributes=wire_attributes, selection=choice
    )
    for name, value in inputs.items():
        spec, location = yield from place_input(core, session, cargo, value, name)
        request.inputs.append(tensor_pb2.Operand(name=name, spec=spec.to_wire(name), location=location))
    results: dict[str, Any] = {}
    for name, target in wanted.items():
        if target is None:
            continue
        spec, location, results[name] = yield from place_output(core, session, cargo, name, target)
        request.outputs.append(tensor_pb2.Operand(name=name, spec=spec.to_wire(name), location=location))
    reply = yield from held(core, cargo, Rpc(steps.RUN, request, limit))
    core.report = Report.of_wire(reply.report, cargo.staged_bytes)
    results.update((yield from collect(core, session, cargo, reply.outputs)))
    return results


def held(core: Core, cargo: Cargo, call: Rpc) -> Flow[Any]:
    """Make a call that reads and writes the cargo's memory. If it is given up half-way the server may still be at it,
    so the memory is kept.
    """
    try:
        if cargo.tensors:
            yield Work(cargo.fence)
        return (yield call)
    except TilewrightError as error:
        if isinstance(error, UNFINISHED):
            core.quarantine(cargo)
        raise
    except BaseException:  # interrupted or cancelled while waiting
        core.quarantine(cargo)
        raise


def explain(
    core: Core,
    operation: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any] | None = None,
    attributes: Mapping[str, Any] | None = None,
    *,
    kernel: str | None = None,
    strategy: str | None = None,
    device: str | None = None,
    timeout: float | None = None,
) -> Flow[dict[str, Any]]:
    """Why which kernel would be chosen: every candidate with its prediction, every refused kernel with its reasons,
    and what decided.

    ``inputs`` and ``outputs`` are arrays or descriptions of them, ``Spec`` or ``(shape, dtype)``. Nothing is built or
    run.
    """
    request = kernels_pb2.ExplainRequest(
        operation=operation,
        inputs=_operands({name: spec_of(value, name) for name, value in inputs.items()}),
        outputs=_operands({name: spec_of(value, name) for name, value in (outputs or {}).items() if value is not None}),
        attributes=attributes_to_wire(attributes or {}),
        selection=selection(kernel, strategy, "wait", device),
    )
    reply = yield Rpc(steps.EXPLAIN, request, check_timeout(timeout) or core.timeout)
    found: dict[str, Any] = json.loads(reply.json)
    return found


def selection(
    kernel: str | None, strategy: str | None, build: BuildPolicy, device: str | None
) -> dispatch_pb2.Selection:
    """How a kernel is to be chosen; naming one implies the strategy ``explicit``. Raises ``InvalidArgumentError``."""
    if not isinstance(build, str) or build not in _POLICIES:
        raise InvalidArgumentError(
            "there is no such build policy", field="build", value=build, rule="build_policy", fix="use wait or fallback"
        )
    for field, value in (("kernel", kernel), ("strategy", strategy), ("device", device)):
        check_name(field, value)
    return dispatch_pb2.Selection(
        strategy=strategy or ("explicit" if kernel else ""),
        kernel=kernel or "",
        build=_POLICIES[build],
        device=device or "",
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
        inputs=_operands(inputs),
        outputs=_operands(outputs),
        attributes=attributes,
        selection=choice,
    )


def _operands(specs: Mapping[str, Spec]) -> list[tensor_pb2.Operand]:
    return [tensor_pb2.Operand(name=name, spec=spec.to_wire(name)) for name, spec in specs.items()]


def _infer(
    core: Core,
    session: Session,
    operation: str,
    inputs: Mapping[str, Spec],
    wanted: Mapping[str, Any],
    attributes: Mapping[str, tensor_pb2.Attribute],
    choice: dispatch_pb2.Selection,
    timeout: float | None,
) -> Flow[dict[str, Spec]]:
    """Shapes and dtypes of the outputs, asked of the server once for each kind of request: only the operation's
    plugin knows its rules.

    A plan says them; the run that follows finds that plan in the server's cache.
    """
    given = {name: spec_of(value, name) for name, value in wanted.items() if value is not None}
    request = plan_request(session, operation, inputs, given, attributes, choice)
    request.session = b""
    key = request.SerializeToString(deterministic=True)
    known = core.inferred.get(key)
    if known is None:
        request.session = session.token
        reply = yield Rpc(steps.PLAN, request, timeout)
        core.release_plan(session, reply.plan)
        known = {output.name: Spec.of_wire(output.spec) for output in reply.outputs}
        core.remember(core.inferred, key, known)
    refuse_outputs(operation, wanted, known)
    return {name: spec for name, spec in known.items() if not wanted or name in wanted}


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

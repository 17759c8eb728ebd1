"""The generic calls: run an operation, explain a choice. Every named operation of this library is arguments for
these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tilewright.dispatch.operands.operands import attributes_to_wire
from tilewright.dispatch.operands.request import (
    BuildPolicy,
    as_operand,
    check_choice,
    config_text,
    named_operands,
    planned_input,
    planned_output,
    selection,
    spec_of,
)
from tilewright.dispatch.plans.plan import PlanState, prepare
from tilewright.errors import InvalidArgumentError, UnsupportedError
from tilewright.session.state import Core, Session, check_timeout
from tilewright.tensor.export import device_for
from tilewright.tensor.interop import DeviceTensor, recognise
from tilewright.tensor.resident import ResidentTensor
from tilewright.transport import rpc
from tilewright.transport.rpc import Flow, Rpc
from tilewright.types.arguments import Placement, check_placement
from tilewright.types.report import first_report
from tilewright.types.spec import Array, Spec, element_strides
from tilewright_proto.v1 import kernels_pb2

__all__ = ["Call", "Made", "explain", "made", "run"]

MAX_PLANS = 512
"""Plans of repeated calls that one session keeps."""
Choice = tuple[str | None, str | None, BuildPolicy, str | None, str]
"""Kernel, strategy, build policy and device that a call names, and the kernel's configuration as JSON."""


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
    launch: Placement | None = None,
    config: Mapping[str, Any] | None = None,
) -> Flow[dict[str, Any]]:
    """Run any operation of the server.

    ``inputs`` maps operand names to arrays (or resident tensors); list members are named ``d[0]``, ``d[1]``, ...
    ``outputs`` maps names to what is to be written: an array, a resident tensor, a ``Spec`` (a fresh array), or
    ``None`` (a fresh array of the inferred shape); left out, the operation's outputs are all inferred. Returns the
    outputs by name; packed ones as ``PackedTensor``.

    Where this process can launch by itself, on a CPU, it uses all arrays in place and makes outputs of its own memory.
    Otherwise arrays from ``empty``, ``zeros`` and ``asarray``, and views of them, are used in place, and so are arrays
    in memory of a GPU that the server runs (PyTorch, CuPy, JAX, anything with DLPack or ``__cuda_array_interface__``);
    others are copied. On GPU memory the operation runs in the order of the current stream and may return before it is
    done, as PyTorch's own do.

    ``kernel`` names a kernel, ``config`` gives one by its fields (those of its signature that are left out follow from
    the operands), ``strategy`` names the way to choose one, ``device`` where to run. ``build="fallback"`` runs
    the best kernel that is built while a better one is being built. ``timeout`` is in seconds, all steps of this call
    together being one or two requests. ``launch`` says who launches: "caller", "server", or "auto", this process where
    it can; ``connect`` has the default.

    Raises ``InvalidArgumentError``, ``UnsupportedError``, ``NotFoundError`` (operation, kernel, device),
    ``BuildFailedError``, ``ToolchainMissingError``, ``ResourceExhaustedError``, ``DeadlineError``,
    ``UnavailableError``.

        >>> result = client.run("gemm", {"a": a, "b": b}, attributes={"alpha": 2.0})  # doctest: +SKIP
        >>> result["out"]  # doctest: +SKIP
    """
    choice = (kernel, strategy, build, device, config_text(config))
    asked = Call(operation, inputs, outputs or {}, attributes or {}, choice, timeout, launch)
    return (yield from made(core, asked)).results


class Call(NamedTuple):
    """Arguments of ``run``."""

    operation: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    attributes: Mapping[str, Any]
    choice: Choice
    timeout: float | None
    launch: Placement | None


class Made(NamedTuple):
    """Results of a call by name, its plan, and its operands in that order, the outputs as they are now."""

    results: dict[str, Any]
    state: PlanState
    operands: Sequence[Any]


def made(core: Core, call: Call) -> Flow[Made]:
    """Make a call: see ``run``."""
    timeout = check_timeout(call.timeout)
    check_choice(*call.choice)
    operands = {name: as_operand(recognise(value, name) or value, name) for name, value in call.inputs.items()}
    found, new = yield from _in_place(core, call, operands)
    if found is not None:
        return found
    session = core.require()
    wanted = dict(call.outputs)
    choice = call.choice
    if choice[3] is None and any(isinstance(value, DeviceTensor) for value in operands.values()):
        choice = (*choice[:3], device_for(session, operands), choice[4])
    specs = {name: planned_input(core, value, name) for name, value in operands.items()}
    targets = {name: planned_output(core, value, name) for name, value in wanted.items() if value is not None}
    state, fresh = yield from _planned(core, call, specs, targets, choice, "server")
    given = {name: value for name, value in wanted.items() if value is not None}
    result = yield from state.execute((), given, operands, 1, timeout)
    if fresh or new is state:
        core.report = first_report(state.report, core.report)
    results = _by_name(state, wanted, result)
    every = [given.get(slot.name, results.get(slot.name)) for slot in state.outputs]
    return Made(results, state, [*(operands.get(slot.name) for slot in state.inputs), *every])


def _by_name(state: PlanState, wanted: Mapping[str, Any], result: Any) -> dict[str, Any]:
    names = [slot.name for slot in state.outputs]
    results: dict[str, Any] = {names[0]: result} if len(names) == 1 else result
    return {name: results[name] for name in wanted or names}


def _in_place(core: Core, call: Call, operands: dict[str, Any]) -> Flow[tuple[Made | None, PlanState | None]]:
    """Launch a call in this process; ``None`` if that is the server's to do, with the plan if one was made for it.
    Raises what refuses it if nobody else may launch it.
    """
    wanted = core.launch if call.launch is None else check_placement(call.launch)
    session = core.session
    if wanted == "server" or session is None:
        return None, None
    kind = _memory(session, call, operands)
    if not kind or (wanted == "auto" and not session.trusted):
        if wanted == "caller":
            raise _no_place(call)
        return None, None
    choice = call.choice
    copied = 0
    if kind == "host":
        plain = {name: _plain(value) for name, value in operands.items()}
        copied = sum(value.nbytes for name, value in plain.items() if value is not operands[name])
        operands = plain
    elif choice[3] is None:
        choice = (*choice[:3], device_for(session, operands), choice[4])
    try:
        specs = {name: spec_of(value, name) for name, value in operands.items()}
        targets = {name: spec_of(value, name) for name, value in call.outputs.items() if value is not None}
        state, fresh = yield from _planned(core, call, specs, targets, choice, wanted)
        given = {name: value for name, value in call.outputs.items() if value is not None}
        found = yield from state.launch_here((), given, operands, None)
    except (InvalidArgumentError, UnsupportedError):
        if wanted == "caller":
            raise
        return None, None  # the server says what is wrong with it, or copies what is laid out too oddly
    if found is None:
        if state.here is None:  # the server's plan as well
            core.plans[_key(call, specs, targets, choice, "server")] = state
        return None, state if fresh else None
    if fresh:
        core.report = first_report(state.report, core.report)
    if copied and core.report is not None:
        core.report = replace(core.report, staged_bytes=copied)
    results = _by_name(state, call.outputs, found[1])
    every = {slot.name: found[1] for slot in state.outputs} if len(state.outputs) == 1 else found[1]
    inputs = [operands.get(slot.name, every.get(slot.name)) for slot in state.inputs]
    return Made(results, state, [*inputs, *(every[slot.name] for slot in state.outputs)]), None


def _memory(session: Session, call: Call, operands: Mapping[str, Any]) -> str:
    """``host`` if all operands are arrays of this process and its CPU is meant, ``device`` if they are tensors of a
    GPU; else empty.
    """
    given = [*operands.values(), *(value for value in call.outputs.values() if value is not None)]
    if all(isinstance(value, (np.ndarray, Spec)) for value in given):
        name = call.choice[3] or session.device
        return "host" if any(item.id == name and item.kind == "cpu" for item in session.devices) else ""
    there = (DeviceTensor, Spec)
    if operands and all(isinstance(value, there) or recognise(value, "out") is not None for value in given):
        return "device"
    return ""


def _plain(array: Array) -> Array:
    """The array, or a copy where its elements do not lie at steps that the protocol can say."""
    return array if not array.size or element_strides(array) is not None else array.copy()


def _no_place(call: Call) -> UnsupportedError:
    return UnsupportedError(
        f"{call.operation} cannot be launched in this process: its operands are not all in one memory of it",
        field="launch",
        value="caller",
        rule="caller_launch_operands",
        fix='pass NumPy arrays for a CPU, or tensors of one GPU, or use launch="auto"',
    )


def _planned(
    core: Core,
    call: Call,
    specs: Mapping[str, Spec],
    targets: Mapping[str, Spec],
    choice: Choice,
    placement: Placement,
) -> Flow[tuple[PlanState, bool]]:
    """The plan of a call, kept for calls alike, and whether it was made for this one."""
    key = _key(call, specs, targets, choice, placement)
    state: PlanState | None = core.plans.get(key)
    # A plan for which a better kernel is being built is asked for again: it may have been swapped meanwhile.
    if state is not None and not state.closed and (choice[2] != "fallback" or state.here is not None):
        return state, False
    kernel, strategy, build, device, config = choice
    targeted = {name: targets.get(name) for name in call.outputs}
    state = yield from prepare(
        core, call.operation, specs, targeted, call.attributes,
        kernel=kernel, strategy=strategy, build=build, device=device, timeout=call.timeout, launch=placement,
        config=config,
    )  # fmt: skip
    if len(core.plans) >= MAX_PLANS:
        core.plans.clear()
    core.plans[key] = state
    return state, True


def _key(
    call: Call, specs: Mapping[str, Spec], targets: Mapping[str, Spec], choice: Choice, placement: Placement
) -> tuple[Any, ...]:
    words = repr(sorted(call.attributes.items()))
    return (call.operation, tuple(specs.items()), tuple(targets.items()), tuple(call.outputs), words, choice, placement)


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
    config: Mapping[str, Any] | None = None,
) -> Flow[dict[str, Any]]:
    """Why which kernel would be chosen: every candidate with its prediction, every refused kernel with its reasons,
    and what decided.

    ``inputs`` and ``outputs`` are arrays or descriptions of them, ``Spec`` or ``(shape, dtype)``. Nothing is built or
    run.
    """
    request = kernels_pb2.ExplainRequest(
        operation=operation,
        inputs=named_operands({name: spec_of(value, name) for name, value in inputs.items()}),
        outputs=named_operands(
            {name: spec_of(value, name) for name, value in (outputs or {}).items() if value is not None}
        ),
        attributes=attributes_to_wire(attributes or {}),
        selection=selection(kernel, strategy, "wait", device, config_text(config)),
    )
    reply = yield Rpc(rpc.EXPLAIN, request, check_timeout(timeout) or core.timeout)
    found: dict[str, Any] = json.loads(reply.json)
    return found

"""The generic calls: run an operation, explain a choice. Every named operation of this library is arguments for
these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tilewright.dispatch.operands import attributes_to_wire
from tilewright.dispatch.plan import PlanState, prepare
from tilewright.dispatch.request import (
    BuildPolicy,
    as_operand,
    check_choice,
    named_operands,
    planned_input,
    planned_output,
    selection,
    spec_of,
)
from tilewright.session.state import Core, check_timeout
from tilewright.tensor.export import device_for
from tilewright.tensor.interop import DeviceTensor, recognise
from tilewright.tensor.resident import ResidentTensor
from tilewright.transport import rpc
from tilewright.transport.rpc import Flow, Rpc
from tilewright.types.report import first_report
from tilewright.types.spec import Array, Spec
from tilewright_proto.v1 import kernels_pb2

__all__ = ["explain", "run"]

MAX_PLANS = 512
"""Plans of repeated calls that one session keeps."""
Choice = tuple[str | None, str | None, BuildPolicy, str | None]
"""Kernel, strategy, build policy and device that a call names."""


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
    check_timeout(timeout)
    check_choice(kernel, strategy, build, device)
    session = core.require()
    wanted = dict(outputs or {})
    operands = {name: as_operand(recognise(value, name) or value, name) for name, value in inputs.items()}
    if device is None and any(isinstance(value, DeviceTensor) for value in operands.values()):
        device = device_for(session, operands)
    state, fresh = yield from _planned(
        core, operation, operands, wanted, attributes or {}, (kernel, strategy, build, device), timeout
    )
    given = {name: value for name, value in wanted.items() if value is not None}
    result = yield from state.execute((), given, operands, 1, timeout)
    if fresh:
        core.report = first_report(state.report, core.report)
    names = [slot.name for slot in state.outputs]
    results: dict[str, Any] = {names[0]: result} if len(names) == 1 else result
    return {name: results[name] for name in wanted or names}


def _planned(
    core: Core,
    operation: str,
    inputs: Mapping[str, Any],
    wanted: Mapping[str, Any],
    attributes: Mapping[str, Any],
    choice: Choice,
    timeout: float | None,
) -> Flow[tuple[PlanState, bool]]:
    """The plan of a call, kept for calls alike, and whether it was made for this one."""
    specs = {name: planned_input(core, value, name) for name, value in inputs.items()}
    targets = {name: planned_output(core, value, name) for name, value in wanted.items() if value is not None}
    described = (tuple(specs.items()), tuple(targets.items()), tuple(wanted), repr(sorted(attributes.items())))
    key = (operation, described, choice)
    state: PlanState | None = core.plans.get(key)
    # A plan for which a better kernel is being built is asked for again: it may have been swapped meanwhile.
    if state is not None and not state.closed and choice[2] != "fallback":
        return state, False
    kernel, strategy, build, device = choice
    targeted = {name: targets.get(name) for name in wanted}
    state = yield from prepare(
        core, operation, specs, targeted, attributes,
        kernel=kernel, strategy=strategy, build=build, device=device, timeout=timeout,
    )  # fmt: skip
    if len(core.plans) >= MAX_PLANS:
        core.plans.clear()
    core.plans[key] = state
    return state, True


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
        inputs=named_operands({name: spec_of(value, name) for name, value in inputs.items()}),
        outputs=named_operands(
            {name: spec_of(value, name) for name, value in (outputs or {}).items() if value is not None}
        ),
        attributes=attributes_to_wire(attributes or {}),
        selection=selection(kernel, strategy, "wait", device),
    )
    reply = yield Rpc(rpc.EXPLAIN, request, check_timeout(timeout) or core.timeout)
    found: dict[str, Any] = json.loads(reply.json)
    return found

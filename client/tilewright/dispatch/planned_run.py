"""Calls on tensors in device memory: by plans that are made on the way and kept, so that nothing waits on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.dispatch.plan import PlanState, prepare
from tilewright.dispatch.run import BuildPolicy
from tilewright.session.state import Core
from tilewright.tensor.interop import DeviceTensor
from tilewright.transport.rpc import Flow

__all__ = ["run_planned"]

MAX_PLANS = 512
"""Kept of one session."""


def run_planned(
    core: Core,
    operation: str,
    inputs: Mapping[str, Any],
    wanted: Mapping[str, Any],
    attributes: Mapping[str, Any],
    *,
    kernel: str | None,
    strategy: str | None,
    build: BuildPolicy,
    device: str | None,
    timeout: float | None,
) -> Flow[dict[str, Any] | None]:
    """``run`` by a plan, in the order of the tensors' streams; ``None`` if no plan can do it: its output is packed."""
    given = {name: value for name, value in wanted.items() if value is not None}
    key = (
        operation,
        tuple((name, _described(value)) for name, value in inputs.items()),
        tuple((name, _described(value)) for name, value in given.items()),
        tuple(wanted),
        repr(sorted(attributes.items())),
        (kernel, strategy, build, device),
    )
    state: PlanState | None = core.device_plans.get(key)
    # A plan for which a better kernel is being built is asked for again: it may have been swapped meanwhile.
    if state is None or state.closed or build == "fallback":
        state = yield from prepare(
            core,
            operation,
            inputs,
            wanted,
            attributes,
            kernel=kernel,
            strategy=strategy,
            build=build,
            device=device,
            timeout=timeout,
        )
        if len(core.device_plans) >= MAX_PLANS:
            core.device_plans.clear()
        core.device_plans[key] = state
    if any(slot.spec.packing for slot in state.outputs):
        return None
    result = yield from state.execute((), given, inputs, 1, timeout)
    names = [slot.name for slot in state.outputs]
    results: dict[str, Any] = {names[0]: result} if len(names) == 1 else result
    return {name: results[name] for name in wanted or names}


def _described(value: Any) -> Any:
    """What of an operand a plan depends on."""
    if isinstance(value, DeviceTensor):
        return value.spec
    spec = getattr(value, "spec", None)
    return spec if spec is not None else (value.shape, value.strides, value.dtype)

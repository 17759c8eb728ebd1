"""A plan bound to its arrays, and many executions in one message. See ``plans``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright import steps, wire
from tilewright.core import check_timeout
from tilewright.dispatch import held
from tilewright.errors import InvalidArgumentError, from_detail
from tilewright.plans import PlanState, report_of, result_of
from tilewright.slots import Loaded, single
from tilewright.steps import Flow, Rpc

__all__ = ["BoundState", "run_many"]


class BoundState:
    """A plan bound to arrays: its request is serialised once."""

    def __init__(self, plan: PlanState, inputs: Sequence[Any], out: Any, named: Mapping[str, Any]) -> None:
        self.plan = plan
        self.inputs = tuple(inputs)
        self.out = out
        self.named = dict(named)
        self.load: Loaded | None = None
        self.request = b""
        self.result: Any = None

    def bind(self) -> Flow[BoundState]:
        yield from self.loaded()
        return self

    def loaded(self) -> Flow[Loaded]:
        """The execution, serialised (again, if the session is a new one). Raises ``InvalidArgumentError`` if its
        arrays would have to be copied.
        """
        plan = self.plan
        if self.load is not None and self.load.session is plan.core.session and not plan.closed:
            plan.core.require()
            return self.load
        load = yield from plan.load(self.inputs, self.out, self.named)
        if load.cargo.staged_bytes or load.cargo.replies:
            raise InvalidArgumentError(
                "an array would have to be copied for every call, which a bound plan does not do",
                field="inputs",
                rule="bound_shared",
                fix="use arrays from empty(), zeros() or asarray() in the plan's layout, or call the plan itself",
            )
        self.result = single(load.result)
        self.request = wire.execute_request(plan.prefix, [load.chunk])
        self.load = load
        return load

    def execute(self, timeout: float | None = None) -> Flow[Any]:
        cargo = (yield from self.loaded()).cargo
        plan = self.plan
        limit = check_timeout(timeout) or plan.core.timeout
        reply = yield from held(plan.core, cargo, Rpc(steps.EXECUTE, self.request, limit))
        if reply.results[0].HasField("error"):
            raise from_detail(reply.results[0].error)
        plan.core.report = report_of(plan, reply.results, reply.queue_ns, 0)
        return self.result


def run_many(plan: PlanState, calls: Sequence[Any], timeout: float | None) -> Flow[list[Any]]:
    loads: list[Loaded] = []
    for call in calls:
        if isinstance(call, BoundState):
            loads.append((yield from call.loaded()))
        elif isinstance(call, Mapping):
            loads.append((yield from plan.load((), None, call)))
        else:
            arrays = tuple(call)
            session = yield from plan.live()
            if (quick := plan.quick(session, arrays)) is not None:
                loads.append(quick)
                continue
            count = len(plan.inputs)
            outs = {slot.name: array for slot, array in zip(plan.outputs, arrays[count:], strict=False)}
            if len(arrays) > count + len(plan.outputs):
                raise plan.refuse_operands(f"{len(arrays)} operands were given")
            loads.append((yield from plan.load(arrays[:count], outs, {})))
    results = yield from plan.send(loads, timeout)
    return [result_of(result) for result in results]

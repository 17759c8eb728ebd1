"""Prepared plans: everything that can be done before arrays have addresses is done once. No I/O; see ``rpc``."""

from __future__ import annotations

import json
import operator
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from tilewright.dispatch.bindings.binding import Launched
from tilewright.dispatch.bindings.fast_path import ShortWay
from tilewright.dispatch.bindings.placement import PlacedPlan, placement_of
from tilewright.dispatch.operands.operands import Cargo, attributes_to_wire, collect
from tilewright.dispatch.operands.request import (
    BuildPolicy,
    config_text,
    held,
    plan_request,
    refuse_outputs,
    selection,
    spec_of,
)
from tilewright.dispatch.operands.slots import Loaded, Slot, known, place_slot_input, place_slot_output, single
from tilewright.errors import InvalidArgumentError, TilewrightError, from_detail
from tilewright.launch.library import load_library
from tilewright.session.state import Core, Session, check_timeout
from tilewright.tensor.export import device_for
from tilewright.tensor.host import HostViews
from tilewright.tensor.interop import DeviceTensor, recognise
from tilewright.transport import messages, rpc
from tilewright.transport.rpc import Flow, Rpc
from tilewright.types.arguments import Placement
from tilewright.types.report import Report, Timing
from tilewright_proto.v1 import dispatch_pb2

__all__ = ["PlanState", "prepare", "report_of", "result_of"]

MAX_REPEAT = 1_000_000
MAX_EXECUTIONS = 4096
"""Executions of one message, at most."""


class PlanState(PlacedPlan):
    """A plan of one session. If the session was replaced (after a fork, or ``reconnect``) the plan is made again on
    its next use.
    """

    def __init__(
        self,
        core: Core,
        request: dispatch_pb2.PlanRequest,
        timeout: float | None,
        placement: Placement = "server",
    ) -> None:
        super().__init__(core, placement)
        self.request = request
        self.timeout = timeout
        self.prefix = b""
        self.slots: tuple[Slot, ...] = ()
        self.flops = 0
        self.workspace_bytes = 0
        self.json = ""
        self.short: ShortWay
        """Fast path of the session in which the plan is valid."""
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def adopt(self, session: Session, reply: dispatch_pb2.PlanReply) -> None:
        self.inputs = tuple(Slot.of(operand) for operand in reply.inputs)
        self.outputs = tuple(Slot.of(operand) for operand in reply.outputs)
        # Only plans with one output take the short way.
        self.slots = (*self.inputs, *self.outputs) if len(self.outputs) == 1 else ()
        self.report = Report.of_wire(reply.report)
        self.flops = reply.flops
        self.workspace_bytes = reply.workspace_bytes
        self.json = reply.json
        self.plan = reply.plan
        self.prefix = messages.session_field(session.token)
        self._finalizer = weakref.finalize(self, self.core.release_plan, session, reply.plan)
        self._finalizer.atexit = False
        self.short = ShortWay(self.core, session, self.report)
        self.session = session

    @property
    def gpu(self) -> bool:
        """True if the plan is for a device other than a CPU."""
        return not self.report.device.startswith("cpu")

    @property
    def description(self) -> dict[str, Any]:
        """Stages, kernels and geometry, as the server tells them."""
        found: dict[str, Any] = json.loads(self.json) if self.json else {}
        return found

    def close(self) -> None:
        """Release the plan with the next call to the server. Also happens when the last reference goes. Idempotent."""
        self.closed = True
        if self.session is not None:
            self.short.clear()
        if self._finalizer is not None:
            self._finalizer()

    def live(self) -> Flow[Session]:
        """The session in which the plan is valid, preparing it there if need be."""
        if self.closed:
            raise InvalidArgumentError("the plan is closed", field="plan", rule="plan_open", fix="make another")
        session = self.core.require()
        if session is not self.session:
            yield from self.made(session)
        return session

    def made(self, session: Session) -> Flow[None]:
        request = self.request
        request.session = session.token
        del request.known_objects[:]
        if self.placement != "server":
            request.placement = dispatch_pb2.PLACEMENT_CALLER
            request.known_objects.extend(load_library().recent_objects())
        self.note_choices(session)
        reply = yield Rpc(rpc.PLAN, request, self.timeout)
        if self._finalizer is not None:
            self._finalizer.detach()
        self.adopt(session, reply)
        yield from self.open_here(session, reply)

    def operands(self, inputs: Sequence[Any], out: Any, named: Mapping[str, Any]) -> list[Any]:
        """Operands in the plan's order; ``None`` for an output that is to be made."""
        return [*self._arguments(inputs, named), *self._targets(out, named)]

    # ---- executions ----

    def load(self, inputs: Sequence[Any], out: Any, named: Mapping[str, Any], repeat: int = 1) -> Flow[Loaded]:
        """Find where the operands are. Nothing but a first registration of new memory talks to the server."""
        session = yield from self.live()
        if not named and repeat == 1 and (quick := self.quick(session, (*inputs, out))) is not None:
            return quick
        cargo = Cargo(session)
        chunks: list[bytes] = []
        for slot, value in zip(self.inputs, self._arguments(inputs, named), strict=True):
            chunk = known(self.core, session, slot, value)
            if chunk is None:
                chunk = yield from place_slot_input(self.core, session, cargo, slot, value)
            else:
                cargo.keep.append(value)
            chunks.append(chunk)
        result: dict[str, Any] = {}
        for slot, value in zip(self.outputs, self._targets(out, named), strict=True):
            target = slot.spec if value is None else value
            chunk = (
                known(self.core, session, slot, target)
                if isinstance(target, np.ndarray) and target.flags.writeable
                else None
            )
            if chunk is None:
                chunk = yield from place_slot_output(self.core, session, cargo, slot, target, result)
            else:
                cargo.keep.append(target)
                result[slot.name] = target
            chunks.append(chunk)
        if cargo.tensors and any(isinstance(kept, np.ndarray) for kept in cargo.keep):
            cargo.in_place = False
        return Loaded(session, messages.execution(self.plan, chunks, repeat), cargo, result)

    def quick(self, session: Session, arrays: tuple[Any, ...]) -> Loaded | None:
        """The common case without ado: all operands are arrays that were used before and lie as planned."""
        slots = self.slots
        if len(arrays) != len(slots):
            return None
        chunks = []
        cache = self.core.known_arrays
        for slot, array in zip(slots, arrays, strict=True):
            entry = cache.get(id(array))
            if entry is None or entry[0]() is not array or entry[1] is not session:
                return None
            if array.shape != slot.spec.shape or array.strides != slot.byte_strides or array.dtype != slot.spec.dtype:
                return None
            chunks.append(entry[2])
        if not arrays[-1].flags.writeable:
            return None
        cargo = Cargo(session)
        cargo.keep.append(arrays)
        return Loaded(session, messages.execution(self.plan, chunks), cargo, {slots[-1].name: arrays[-1]})

    def _arguments(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        names = [slot.name for slot in self.inputs]
        if len(inputs) > len(names):
            raise self.refuse_operands(f"{len(inputs)} inputs were given")
        given = dict(zip(names, inputs, strict=False))
        outputs = {slot.name for slot in self.outputs}
        for name, value in named.items():
            if name in given or (name not in names and name not in outputs):
                raise self.refuse_operands(f"{name} was given " + ("twice" if name in given else "besides"))
            given[name] = value
        missing = [name for name in names if name not in given]
        if missing:
            raise self.refuse_operands(f"{', '.join(missing)} was not given")
        return [given[name] for name in names]

    def refuse_operands(self, what: str) -> InvalidArgumentError:
        names = ", ".join(slot.name for slot in self.inputs)
        return InvalidArgumentError(
            f"the plan takes {names}, but {what}",
            field="inputs",
            rule="plan_operands",
            fix=f"pass {names}, in this order or by name",
        )

    def _targets(self, out: Any, named: Mapping[str, Any]) -> list[Any]:
        if isinstance(out, Mapping):
            refuse_outputs("the plan", out, (slot.name for slot in self.outputs))
            return [named.get(slot.name) if out.get(slot.name) is None else out[slot.name] for slot in self.outputs]
        if out is not None and len(self.outputs) != 1:
            raise InvalidArgumentError(
                "the plan has several outputs",
                field="out",
                rule="plan_operands",
                fix="pass out as a dict of " + ", ".join(slot.name for slot in self.outputs),
            )
        return [named.get(slot.name) if out is None else out for slot in self.outputs]

    def execute(
        self, inputs: Sequence[Any], out: Any, named: Mapping[str, Any], repeat: int, timeout: float | None
    ) -> Flow[Any]:
        if out is not None and type(out) is not np.ndarray:
            views = HostViews()
            viewed = views.view(out)
            if views:
                return views.tensor((yield from self.execute(inputs, viewed, named, repeat, timeout)))
        if repeat == 1:
            return (yield from self.launch(inputs, out, named, timeout=timeout))[1]
        found = yield from self.launch_here(inputs, out, named, None, _check_repeat(repeat))
        if found is not None:
            return found[1]
        loaded = yield from self.load(inputs, out, named, _check_repeat(repeat))
        results = yield from self.send([loaded], timeout)
        return result_of(results[0])

    def launch(
        self,
        inputs: Sequence[Any],
        out: Any,
        named: Mapping[str, Any],
        stream: int | None = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Flow[tuple[Launched, Any]]:
        """Run it once, without waiting for the end where launches are asynchronous; with its output."""
        limit = check_timeout(timeout)
        found = yield from self.launch_here(inputs, out, named, stream)
        if found is not None:
            return found
        if self.gpu:
            session = yield from self.live()
            values = self.operands(inputs, out, named)
            recalled = self.short.recalls.find(self.inputs, self.outputs, values)
            if recalled is not None and session.lanes is not None:
                count, tensors = len(self.inputs), recalled.tensors
                made = {slot.name: item for slot, item in zip(self.outputs, tensors[count:], strict=True)}
                if (binding := recalled.binding) is not None:
                    launched = yield from self.short.queue(binding, tensors, tensors, stream, wait)
                    if launched is not None:
                        return launched, single({name: item.value for name, item in made.items()})
                inputs, out, named = tensors[:count], made, {}  # the long way, with what was made of them
        loaded = yield from self.load(inputs, out, named)
        # Only requests have deadlines of their own; on a GPU they are for what happens before the launch.
        if loaded.cargo.tensors or (limit is None and self.short.often(loaded)):
            slots = len(self.inputs) + len(self.outputs)
            launched = yield from self.short.launch(loaded, limit or self.core.timeout, slots, stream, wait)
            if launched is not None:
                return launched, single(loaded.result)
        if stream is not None:
            for tensor in loaded.cargo.tensors:
                tensor.stream = stream
        result = result_of((yield from self.send([loaded], timeout))[0])
        report = self.core.report
        return Launched(report.timing.device_ns if report is not None else 0), result

    def send(self, loads: Sequence[Loaded], timeout: float | None) -> Flow[list[Any]]:
        """Run loaded executions, in one message if they fit. One that failed has its exception in the list."""
        if not loads:
            return []
        core, session = self.core, loads[0].session
        limit = check_timeout(timeout) or core.timeout
        deadline = None if limit is None else time.monotonic() + limit
        prefix = messages.session_field(session.token)
        results: list[Any] = []
        answers: list[dispatch_pb2.ExecutionResult] = []
        queue_ns = 0
        for part in [loads] if len(loads) == 1 else _messages(loads):
            if answers and deadline is not None:
                # A moment at least: what is too late is the server's to say.
                limit = max(deadline - time.monotonic(), 1e-3)
            joint = Cargo(session)
            joint.keep.append([load.cargo for load in part])
            joint.tensors = [tensor for load in part for tensor in load.cargo.tensors]
            request = messages.execute_request(prefix, [load.chunk for load in part])
            reply = yield from held(core, joint, Rpc(rpc.EXECUTE, request, limit))
            for load, message in zip(part, reply.results, strict=True):
                if message.HasField("error"):
                    results.append(from_detail(message.error))
                    core.note(results[-1])
                    continue
                if load.cargo.replies or load.cargo.copies:
                    load.result.update((yield from collect(core, session, load.cargo, message.outputs)))
                results.append(single(load.result))
            answers += reply.results
            queue_ns += reply.queue_ns
        core.report = report_of(self, answers, queue_ns, sum(load.cargo.staged_bytes for load in loads))
        return results


def _messages(loads: Sequence[Loaded]) -> Iterator[Sequence[Loaded]]:
    """Executions by message, in order, within the protocol's and the server's limits."""
    room = loads[0].session.message_room
    start = size = 0
    for index, load in enumerate(loads):
        size += load.weight
        if index > start and (size > room or index - start == MAX_EXECUTIONS):
            yield loads[start:index]
            start, size = index, load.weight
    yield loads[start:]


def _check_repeat(repeat: Any) -> int:
    try:
        count = -1 if isinstance(repeat, bool) else operator.index(repeat)
    except TypeError:
        count = -1
    if not 1 <= count <= MAX_REPEAT:
        raise InvalidArgumentError(
            f"an execution is repeated 1 to {MAX_REPEAT} times",
            field="repeat",
            value=repeat,
            rule="repeat_limit",
            fix="give an integer in that range, or call again",
        )
    return count


def report_of(plan: PlanState, results: Sequence[dispatch_pb2.ExecutionResult], queue_ns: int, staged: int) -> Report:
    return Report(
        kernels=plan.report.kernels,
        device=plan.report.device,
        timing=Timing(queue_ns=queue_ns, device_ns=sum(item.device_ns for item in results)),
        bytes_copied=sum(item.bytes_copied for item in results),
        staged_bytes=staged,
        plan_cached=True,
    )


def result_of(result: Any) -> Any:
    if isinstance(result, TilewrightError):
        raise result
    return result


def prepare(
    core: Core,
    operation: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any] | None = None,
    attributes: Mapping[str, Any] | None = None,
    *,
    kernel: str | None = None,
    strategy: str | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
    launch: Placement | None = None,
    config: Mapping[str, Any] | str | None = None,
) -> Flow[PlanState]:
    """Prepare a plan for any operation, from arrays or descriptions (``Spec``, or ``(shape, dtype)``) of its
    operands.

    Calling the plan does no planning. It is made for the layouts that it was given: arrays of other strides are
    copied, of other shapes or dtypes refused. Arguments and errors are those of ``run``; ``launch`` is for all calls
    of the plan.

        >>> plan = client.plan("gemm", {"a": ((64, 64), "fp32"), "b": ((64, 64), "fp32")})  # doctest: +SKIP
        >>> c = plan(a, b)  # doctest: +SKIP
    """
    limit = check_timeout(timeout) or core.timeout
    text = config if isinstance(config, str) else config_text(config)
    session = core.require()
    placement = yield from placement_of(core, session, launch)
    inputs = {name: recognise(value, name) or value for name, value in inputs.items()}
    if device is None and any(isinstance(value, DeviceTensor) for value in inputs.values()):
        device = device_for(session, inputs)
    request = plan_request(
        session,
        operation,
        {name: spec_of(value, name) for name, value in inputs.items()},
        {name: spec_of(value, name) for name, value in (outputs or {}).items() if value is not None},
        attributes_to_wire(attributes or {}),
        selection(kernel, strategy, build, device, text),
    )
    state = PlanState(core, request, limit, placement)
    yield from state.live()
    if placement == "caller" and state.refused is not None:
        state.close()
        raise copy(state.refused)
    try:
        refuse_outputs(operation, outputs or (), (slot.name for slot in state.outputs))
    except InvalidArgumentError:
        state.close()
        raise
    return state

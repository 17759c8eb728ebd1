"""A plan bound to its arrays, and many executions in one message. See ``plans``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.dispatch.bindings.binding import Binding, Go, Launched, bind, can_bind, launcher, watched
from tilewright.dispatch.bindings.fast_path import launch_report
from tilewright.dispatch.bindings.in_place import BoundInPlace
from tilewright.dispatch.operands.request import held
from tilewright.dispatch.operands.slots import Loaded, single
from tilewright.dispatch.plans.plan import PlanState, report_of, result_of
from tilewright.errors import (
    UNFINISHED,
    InvalidArgumentError,
    NotFoundError,
    TilewrightError,
    UnavailableError,
    from_detail,
    is_unfinished,
)
from tilewright.session.recovery import PATIENCE_S, surviving
from tilewright.session.state import check_timeout
from tilewright.tensor.host import HostViews
from tilewright.tensor.interop import DeviceTensor
from tilewright.transport import messages, rpc
from tilewright.transport.launch_connections import NoLaneError
from tilewright.transport.rpc import Flow, Rpc

__all__ = ["BoundState", "run_many"]


class BoundState:
    """A plan bound to arrays: its request is serialised once, and over the local socket it is only an id."""

    def __init__(self, plan: PlanState, inputs: Sequence[Any], out: Any, named: Mapping[str, Any]) -> None:
        self.plan = plan
        self.views = HostViews()
        """Tensors of PyTorch on the host: what lies over their memory is bound, and they are the results."""
        self.inputs = self.views.view(tuple(inputs))
        self.out = self.views.view(out)
        self.named = self.views.view(dict(named))
        self.load: Loaded | None = None
        self.request = b""
        self.result: Any = None
        self.binding: Binding | None = None
        """The server's id of this, once it was launched over the local socket."""
        self.go: Go | None = None
        """Launches the binding."""
        self.here: BoundInPlace | None = None
        """The binding in this process, if that is where it is launched."""
        self._report = plan.report
        """The report of the plan that is bound here, which stays when the plan takes a better kernel."""
        self._launched_here = functools.partial(launch_report, plan.report, 0, "caller")
        """The report of a launch on a GPU in this process."""
        self.quick_here: Callable[[], int] | None = None
        """Launches on the current stream of a GPU in this process, and returns it; 0 if the long way is to be taken."""
        self._queued = functools.partial(launch_report, plan.report, 0)
        """The report of a launch that was not waited for."""
        self._kept_until = 0.0

    @property
    def tensors(self) -> list[DeviceTensor]:
        """The arrays in device memory."""
        if self.here is not None:
            return self.here.tensors
        return self.load.cargo.tensors if self.load is not None else []

    def fence(self) -> None:
        if self.load is not None:
            self.load.cargo.fence()

    def bind(self) -> Flow[BoundState]:
        plan = self.plan
        here = yield from plan.opened_here()
        if here is not None:
            try:
                self.here = BoundInPlace(here, plan.operands(self.inputs, self.out, self.named))
            except TilewrightError as error:
                plan.fail_here(error)
            else:
                self.result, self._report = self.views.tensor(self.here.result), plan.report
                self._launched_here = functools.partial(launch_report, plan.report, 0, "caller")
                self.quick_here = self.here.quick(plan, self._launched_here)
                return self
        yield from self.loaded()
        return self

    # ---- launches in this process ----

    def is_here(self) -> bool:
        """True if it is launched in this process."""
        return self.here is not None and self.here.valid and not self.plan.closed and not self.plan.core.closed

    def launch_here(self, stream: int | None = None) -> Launched | None:
        """Launch it in this process, if that is where it is launched. Raises what the library finds wrong."""
        here, plan = self.here, self.plan
        if here is None or plan.closed or plan.core.closed or not here.valid:
            return None
        launched = here(stream)
        plan.core.report = (
            self._launched_here
            if here.tensors
            else functools.partial(launch_report, self._report, launched.device_ns, "caller")
        )
        return launched

    def run_here(self) -> bool:
        """Launch it in this process, if that is where it is launched."""
        here, plan = self.here, self.plan
        if here is None or plan.closed or plan.core.closed:
            return False
        if here.tensors:
            if not here.valid:
                return False
            here.enqueue()
            plan.core.report = self._launched_here
        else:
            plan.core.report = functools.partial(launch_report, self._report, here.run(), "caller")
        return True

    def sendable(self) -> Flow[Loaded]:
        """The execution for a message. Arrays of this process alone are copied, as those of a call are."""
        if self.here is None:
            return (yield from self.loaded())
        out = self.result if self.out is None else self.out
        return (yield from self.plan.load(self.inputs, out, self.named))

    def loaded(self) -> Flow[Loaded]:
        """The execution, serialised (again, if the session is a new one). Raises ``InvalidArgumentError`` if its
        arrays would have to be copied.
        """
        plan = self.plan
        if self.binding is not None and not self.binding.valid:
            self.forget()
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
        self.result = self.views.tensor(single(load.result))
        self.request = messages.execute_request(plan.prefix, [load.chunk])
        self.load, self.binding, self.go = load, None, None
        return load

    def settled(self) -> Flow[Binding | None]:
        """The server's id of this; ``None`` if it can only be sent as a request."""
        load = yield from self.loaded()
        if self.binding is None and can_bind(load):
            core = self.plan.core
            try:
                self.binding = yield from bind(core, load, core.timeout)
            except TilewrightError:  # the device may have lost the memory that this names
                self.forget()
                raise
            if self.binding is not None:
                self.go = launcher(self.binding, load.cargo.tensors)
        return self.binding

    def quick(self) -> Go | None:
        """Launcher of this binding, if nothing else is to be done first."""
        core, binding = self.plan.core, self.binding
        if binding is None or self.plan.closed or not core.idle:
            return None
        session = core.session
        if session is None or session.lost or binding.session is not session or not binding.valid:
            return None
        return self.go

    def launched(self, stream: int | None, wait: bool) -> Flow[Launched | None]:
        """Launch it over the local socket; ``None`` if that cannot be."""
        binding = yield from self.settled()
        if binding is None or self.go is None:
            return None
        go = functools.partial(self.go, stream, wait)
        try:
            launched: Launched = yield from watched(self.plan.core, go, self.load)
        except NoLaneError:
            return None
        except (NotFoundError, UnavailableError):  # it went with its memory, or with the device: see ``surviving``
            self.forget()
            raise
        self._tell(launched, wait)
        return launched

    def forget(self) -> None:
        """Find and bind everything again at the next launch."""
        self.load = self.binding = self.go = None

    def _tell(self, launched: Launched, wait: bool) -> None:
        core, ns = self.plan.core, launched.device_ns
        core.report = functools.partial(launch_report, self.plan.report, ns) if ns else self._queued
        # Nothing says when a launch is over that no stream waits for.
        if not wait and launched.lane is not None and (now := time.monotonic()) > self._kept_until:
            self._kept_until = now + 1
            core.quarantine(self.load)

    def launch_now(self, go: Go, stream: int | None = None, wait: bool = True) -> Launched:
        """Launch, with what ``quick`` gave."""
        core, load = self.plan.core, self.load
        try:
            launched = go(stream, wait)
        except TilewrightError as error:
            core.note(error)
            if is_unfinished(error):
                core.quarantine(load)
            if isinstance(error, UNFINISHED) and not isinstance(error, NoLaneError):
                self.forget()
            raise
        except BaseException:
            core.quarantine(load)
            raise
        self._tell(launched, wait)
        return launched

    def execute(self, timeout: float | None = None) -> Flow[Any]:
        limit = check_timeout(timeout)
        if self.run_here():
            return self.result
        if limit is None and (yield from self.launched(None, True)) is not None:
            return self.result
        yield from self.sent(limit)
        return self.result

    def sent(self, limit: float | None) -> Flow[int]:
        """Run it by a request. Returns its device time in nanoseconds."""
        cargo = (yield from self.loaded()).cargo
        plan = self.plan
        reply = yield from held(plan.core, cargo, Rpc(rpc.EXECUTE, self.request, limit or plan.core.timeout))
        if reply.results[0].HasField("error"):
            error = from_detail(reply.results[0].error)
            plan.core.note(error)
            if isinstance(error, UnavailableError):
                self.forget()
            raise error
        plan.core.report = report_of(plan, reply.results, reply.queue_ns, 0)
        return int(reply.results[0].device_ns)

    def launch(self, stream: int | None, wait: bool) -> Flow[Launched]:
        """Launch it, or run it to its end where launches are not asynchronous."""
        if (here := self.launch_here(stream)) is not None:
            return here
        launched = yield from self.launched(stream, wait)
        if launched is not None:
            return launched
        if stream is not None:
            for tensor in self.tensors:
                tensor.stream = stream
        return Launched((yield from self.sent(None)))


def run_many(plan: PlanState, calls: Sequence[Any], timeout: float | None) -> Flow[list[Any]]:
    loads: list[Loaded] = []
    if (yield from plan.opened_here()) is not None:
        return (yield from _many_here(plan, calls, timeout))
    for call in calls:
        if isinstance(call, BoundState):
            loads.append((yield from call.sendable()))
        elif isinstance(call, Mapping):
            loads.append((yield from plan.load((), None, call)))
        else:
            arrays = tuple(call)
            session = yield from plan.live()
            if (quick := plan.quick(session, arrays)) is not None:
                loads.append(quick)
                continue
            inputs, outs = _divided(plan, arrays)
            loads.append((yield from plan.load(inputs, outs, {})))
    results = yield from plan.send(loads, timeout)
    return [result_of(result) for result in results]


def _divided(plan: PlanState, arrays: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Inputs, and then outputs by name."""
    count = len(plan.inputs)
    if len(arrays) > count + len(plan.outputs):
        raise plan.refuse_operands(f"{len(arrays)} operands were given")
    return arrays[:count], {slot.name: array for slot, array in zip(plan.outputs, arrays[count:], strict=False)}


def _many_here(plan: PlanState, calls: Sequence[Any], timeout: float | None) -> Flow[list[Any]]:
    """Launch one after the other in this process; what cannot be launched here is sent by itself, and made again by
    itself if its session is over."""
    core = plan.core
    results: list[Any] = []
    for call in calls:
        try:
            if isinstance(call, BoundState):
                one = functools.partial(call.execute, timeout)
            elif isinstance(call, Mapping):
                one = functools.partial(plan.execute, (), None, call, 1, timeout)
            else:
                inputs, outs = _divided(plan, tuple(call))
                one = functools.partial(plan.execute, inputs, outs, {}, 1, timeout)
            results.append((yield from surviving(core, one, timeout, PATIENCE_S)))
        except TilewrightError as error:  # noqa: PERF203 - all are run
            error.repeatable = False  # the others were run
            results.append(error)
    return [result_of(result) for result in results]

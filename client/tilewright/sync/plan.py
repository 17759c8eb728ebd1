"""Prepared plans and streams of the blocking client."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any

import grpc

from tilewright.dispatch.operands.batch import Batcher, not_sent
from tilewright.dispatch.plans.bound import BoundState, run_many
from tilewright.dispatch.plans.description import PlanBase
from tilewright.dispatch.plans.plan import PlanState
from tilewright.errors import NotFoundError, TilewrightError, UnavailableError
from tilewright.gpu.streams import stream_handle
from tilewright.session.grpc import call_failed
from tilewright.session.state import check_timeout
from tilewright.sync.connection import FlowRunner
from tilewright.sync.launch_handle import Launch
from tilewright.transport.request_ids import named
from tilewright.transport.rpc import EXECUTE_STREAM, MISSED
from tilewright.transport.tracing import call_span
from tilewright_proto.v1 import dispatch_pb2

__all__ = ["Bound", "Plan", "Stream"]


class Plan(PlanBase):
    """A prepared plan: calling it does no planning. Thread-safe. Released by ``close``, or when the last reference
    goes.
    """

    def __init__(self, client: FlowRunner, state: PlanState) -> None:
        super().__init__(state)
        self._client = client

    def __call__(
        self, *inputs: Any, out: Any = None, repeat: int = 1, timeout: float | None = None, **named: Any
    ) -> Any:
        """Run it. Inputs in the plan's order or by name; ``out`` is an array to write into (a dict, if the plan has
        several outputs), left out a fresh one. ``repeat`` runs it up to a million times over. Returns the output
        (several: a dict).
        """
        if repeat == 1 and timeout is None and (result := self._state.attempt(inputs, out, named)) is not MISSED:
            return result
        return self._client._drive(self._state.execute, inputs, out, named, repeat, timeout=timeout)

    def launch(self, *inputs: Any, out: Any = None, stream: Any = None, wait: bool = True, **named: Any) -> Launch:
        """Launch it on these arrays behind what is on a stream of a GPU, and return before it ends; arguments as those
        of a call and of ``Bound.launch``. What was settled with the server for the same arrays is used again. On a CPU,
        and for arrays that have to be copied, it is run, and is over when this returns.
        """
        place = None if stream is None else stream_handle(stream)
        return Launch(*self._client._drive(self._state.launch, inputs, out, named, place, wait))

    def run_many(self, calls: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        """Run many executions in one message (more, if its limits ask for it): each a tuple of inputs and then
        outputs, a dict by name, or a ``Bound``. Results in order.

        All are run, even if one fails; the first failure is then raised. ``timeout`` is for all of them.
        """
        return self._client._drive(
            run_many, self._state, [call._state if isinstance(call, Bound) else call for call in calls], timeout=timeout
        )

    def bind(self, *inputs: Any, out: Any = None, **named: Any) -> Bound:
        """The plan with its arrays in the planned layout, which must be on the plan's GPU, or anywhere in this process
        where it launches by itself, else in shared memory: the fastest way to run it again and again. They are kept
        alive, and used where they were when they were bound.
        """
        return Bound(self._client, self._client._drive(BoundState(self._state, inputs, out, named).bind))

    def stream(self, *, max_pending: int = 4096, timeout: float | None = None) -> Stream:
        """A stream for many executions in flight. ``timeout``: seconds after which an execution that was not launched
        is given up.
        """
        return Stream(self._client, self._state, max_pending, timeout)

    def __enter__(self) -> Plan:
        return self


class Bound:
    """A plan bound to arrays. ``bound()`` runs it and returns the output array, always the same one."""

    def __init__(self, client: FlowRunner, state: BoundState) -> None:
        self._client = client
        self._state = state

    def __call__(self, *, timeout: float | None = None) -> Any:
        """Run it. On a GPU: in the order of the current stream of the library that made the output, and without
        waiting for its end.
        """
        state = self._state
        if timeout is None and (((quick := state.quick_here) is not None and quick()) or state.run_here()):
            return state.result
        if timeout is None and (go := state.quick()) is not None:
            try:
                state.launch_now(go)
            except (NotFoundError, UnavailableError) as error:
                if not _has_long_way(error):
                    raise
            else:
                return state.result
        return self._client._drive(state.execute, timeout=timeout)

    def launch(self, stream: Any = None, wait: bool = True) -> Launch:
        """Launch it behind what is on a stream of a GPU (one of PyTorch or CuPy, or the driver's handle; the current
        one of the library that made the output, if it is left out), and return before it ends.

        With ``wait`` the stream waits for its end, so that later work on the stream sees the result; without, nothing
        does until ``Launch.wait`` or ``Launch.synchronize``. On a CPU it is run, and is over when this returns.
        """
        state = self._state
        if stream is None and (quick := state.quick_here) is not None and (now := quick()):
            return Launch(state.here.outcome(now), state.result)  # type: ignore[union-attr]
        place = None if stream is None else stream_handle(stream)
        if (here := state.launch_here(place)) is not None:
            return Launch(here, state.result)
        if (go := state.quick()) is not None:
            try:
                return Launch(state.launch_now(go, place, wait), state.result)
            except (NotFoundError, UnavailableError) as error:
                if not _has_long_way(error):
                    raise
        launched = self._client._drive(state.launch, place, wait)
        return Launch(launched, state.result)

    @property
    def out(self) -> Any:
        """The output array (several: a dict)."""
        return self._state.result


def _has_long_way(error: TilewrightError) -> bool:
    """True for a launch that did not begin: the long way connects, opens a session or binds again."""
    return error.repeatable or isinstance(error, NotFoundError)


class Stream:
    """Executions in order, many in flight. A context manager; leaving it waits for all of them. Thread-safe.

    Executions that are submitted while others are under way travel together in one message.
    """

    def __init__(self, client: FlowRunner, plan: PlanState, max_pending: int, timeout: float | None) -> None:
        limit = check_timeout(timeout)
        self._client = client
        self._plan = plan
        self._batches: Batcher[Future[Any]] = Batcher(max(1, round(limit * 1000)) if limit else 0)
        self._changed = threading.Condition()
        self._room = threading.BoundedSemaphore(max(1, max_pending))
        self._closing = False
        self._error: TilewrightError | None = None
        self._last: Future[Any] | None = None
        client._drive(plan.live)
        self._connection = client._connected()
        self._span = call_span(EXECUTE_STREAM)
        open_stream = self._connection.channel.stream_stream(EXECUTE_STREAM)
        self._metadata = self._connection.names.next()
        traced = self._span.metadata if self._span is not None else ()
        self._call = open_stream(self._requests(), metadata=(*self._metadata, *traced))
        self._reader = threading.Thread(target=self._read, name="tilewright-stream", daemon=True)
        self._reader.start()

    def submit(self, *inputs: Any, out: Any = None, **named: Any) -> Future[Any]:
        """Send an execution (operands as for calling the plan, or one ``Bound``) and return its future. Waits only
        while ``max_pending`` have no result.

        The arrays may not be changed until the future is done. A failed execution fails its own future only.
        """
        client = self._client
        if len(inputs) == 1 and isinstance(inputs[0], Bound):
            load = client._drive(inputs[0]._state.sendable)
        else:
            load = client._drive(self._plan.load, inputs, out, named)
        load.cargo.fence()
        future: Future[Any] = Future()
        self._room.acquire()
        with self._changed:
            if self._closing or self._error is not None or load.session is not self._connection.session:
                self._room.release()
                raise self._error or UnavailableError("the stream is closed", field="stream", rule="stream_open")
            future.set_running_or_notify_cancel()
            self._batches.pending.append((load, future))
            self._last = future
            if self._batches.ready:
                self._changed.notify_all()
        return future

    def drain(self) -> None:
        """Wait until everything that was submitted has its result."""
        last = self._last
        if last is not None:
            wait([last])

    def close(self) -> None:
        """Wait for all executions and end the stream. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._reader.join()

    def cancel(self) -> None:
        """End the stream at once; futures without a result fail with ``CancelledError``."""
        self._call.cancel()
        self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.cancel()

    def _requests(self) -> Iterator[bytes]:
        """Messages for gRPC's sending thread."""
        batches, changed = self._batches, self._changed
        while True:
            with changed:
                while not batches.ready:
                    if self._error is not None or (self._closing and not batches.pending):
                        return
                    changed.wait()
                message = batches.take()
            yield message

    def _read(self) -> None:
        error: TilewrightError | None = None
        try:
            for data in self._call:
                reply = dispatch_pb2.ExecuteReply.FromString(data)
                with self._changed:
                    done = self._batches.answered(reply)
                    self._changed.notify_all()
                for future, result in done:
                    self._settle(future, result)
        except grpc.RpcError as failure:
            error = named(call_failed(self._client._subject, self._connection.session, failure), self._metadata)
        except Exception as failure:
            error = UnavailableError(f"the stream broke: {failure}", field="stream", rule="stream_open")
            self._call.cancel()
        if self._span is not None:
            self._span.end(error)
        error = error or UnavailableError("the stream is over", field="stream", rule="stream_open")
        with self._changed:
            self._error = not_sent(error)
            rest = self._batches.abandon(error)
            self._changed.notify_all()
        if rest:
            self._client._subject.quarantine([load.cargo for load, _, _ in rest])
        for _, future, failed in rest:
            self._settle(future, failed)

    def _settle(self, future: Future[Any], result: Any) -> None:
        self._room.release()
        if isinstance(result, TilewrightError):
            future.set_exception(result)
        else:
            future.set_result(result)

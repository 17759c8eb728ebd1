"""Prepared plans and streams of the asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from tilewright.aio.connection import Connection, FlowRunner
from tilewright.dispatch.operands.batch import Batcher, not_sent
from tilewright.dispatch.plans.bound import BoundState, run_many
from tilewright.dispatch.plans.description import PlanBase
from tilewright.dispatch.plans.pipeline import LaunchBase, PipelineState
from tilewright.dispatch.plans.plan import PlanState
from tilewright.errors import CancelledError, TilewrightError, UnavailableError
from tilewright.gpu.streams import stream_handle
from tilewright.session.grpc import call_failed
from tilewright.session.state import check_timeout
from tilewright.sync.pipeline import no_pipeline
from tilewright.transport.request_ids import Metadata, named
from tilewright.transport.rpc import EXECUTE_STREAM
from tilewright.transport.tracing import CallSpan, call_span
from tilewright_proto.v1 import dispatch_pb2

__all__ = ["Bound", "Launch", "Pipeline", "Plan", "Stream"]


class Plan(PlanBase):
    """A prepared plan; see ``tilewright.Plan``."""

    def __init__(self, client: FlowRunner, state: PlanState) -> None:
        super().__init__(state)
        self._client = client

    async def __call__(
        self, *inputs: Any, out: Any = None, repeat: int = 1, timeout: float | None = None, **named: Any
    ) -> Any:
        """Run it."""
        return await self._client._drive(self._state.execute, inputs, out, named, repeat, timeout=timeout)

    async def launch(
        self, *inputs: Any, out: Any = None, stream: Any = None, wait: bool = True, **named: Any
    ) -> Launch:
        """Launch it on these arrays behind what is on a stream of a GPU; see ``tilewright.Plan.launch``."""
        place = None if stream is None else stream_handle(stream)
        return Launch(*await self._client._drive(self._state.launch, inputs, out, named, place, wait))

    async def run_many(self, calls: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        """Run many executions in one message."""
        states = [call._state if isinstance(call, Bound) else call for call in calls]
        return await self._client._drive(run_many, self._state, states, timeout=timeout)

    async def bind(self, *inputs: Any, out: Any = None, **named: Any) -> Bound:
        """The plan with its arrays, which must be in shared memory in the planned layout."""
        return Bound(self._client, await self._client._drive(BoundState(self._state, inputs, out, named).bind))

    def stream(self, *, max_pending: int = 4096, timeout: float | None = None) -> Stream:
        """A stream for many executions in flight; use it with ``async with``."""
        return Stream(self._client, self._state, max_pending, timeout)

    async def __aenter__(self) -> Plan:
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


class Bound:
    """A plan bound to arrays; ``await bound()`` runs it."""

    def __init__(self, client: FlowRunner, state: BoundState) -> None:
        self._client = client
        self._state = state

    async def __call__(self, *, timeout: float | None = None) -> Any:
        return await self._client._drive(self._state.execute, timeout=timeout)

    async def launch(self, stream: Any = None, wait: bool = True) -> Launch:
        """Launch it behind what is on a stream of a GPU; see ``tilewright.Bound.launch``."""
        place = None if stream is None else stream_handle(stream)
        launched = await self._client._drive(self._state.launch, place, wait)
        return Launch(launched, self._state.result)

    @property
    def out(self) -> Any:
        """The output array (several: a dict)."""
        return self._state.result


class Launch(LaunchBase):
    """A launch of a bound plan; see ``tilewright.Launch``."""

    async def synchronize(self) -> Any:
        """Wait until it is over. Returns the output."""
        await asyncio.to_thread(self._synchronize)
        return self.out


class Pipeline:
    """Many launches on one stream; see ``tilewright.Pipeline``. Use it with ``async with``."""

    def __init__(self, client: FlowRunner, stream: Any) -> None:
        self._client = client
        self._state = PipelineState(client._subject, stream)

    async def launch(self, bound: Bound) -> None:
        """Launch a bound plan. Whether that went well is known at ``join``."""
        state, pipeline = bound._state, self._state
        if state.is_here():
            await asyncio.to_thread(pipeline.add_here, state)
            return
        if not pipeline.ready(state) and await self._client._drive(state.settled) is None:
            raise no_pipeline()
        if not pipeline.opened:
            await asyncio.to_thread(pipeline.open, state)
        if pipeline.add(state):
            await asyncio.to_thread(pipeline.flush)

    async def order(self) -> None:
        """Later launches wait for what is on the stream now."""
        await asyncio.to_thread(self._state.order)

    async def flush(self) -> None:
        """Send what was launched, without waiting for it."""
        await asyncio.to_thread(self._state.flush)

    async def join(self) -> None:
        """Make the stream wait for everything that was launched. Raises the first error of a launch."""
        self.failures = await asyncio.to_thread(self._state.join)
        if self.failures:
            raise self.failures[0][1]

    failures: list[tuple[int, TilewrightError]] = []  # noqa: RUF012 - replaced, never changed
    """(number of the launch, error) of the last ``join``."""

    @property
    def launches(self) -> int:
        """How many there were."""
        return self._state.launches

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            await self.join()
        else:
            self.failures = await asyncio.to_thread(self._state.join)


class Stream:
    """Executions in order, many in flight; see ``tilewright.Stream``."""

    def __init__(self, client: FlowRunner, plan: PlanState, max_pending: int, timeout: float | None) -> None:
        limit = check_timeout(timeout)
        self._client = client
        self._plan = plan
        self._batches: Batcher[asyncio.Future[Any]] = Batcher(max(1, round(limit * 1000)) if limit else 0)
        self._room = asyncio.Semaphore(max(1, max_pending))
        self._wake = asyncio.Event()
        self._closing = False
        self._error: TilewrightError | None = None
        self._last: asyncio.Future[Any] | None = None
        self._connection: Connection
        self._tasks: list[asyncio.Task[None]] = []
        self._call: Any = None
        self._span: CallSpan | None = None
        self._metadata: Metadata = ()

    async def __aenter__(self) -> Stream:
        await self._client._drive(self._plan.live)
        self._connection = self._client._connected().use()
        self._span = call_span(EXECUTE_STREAM)
        open_stream = self._connection.channel.stream_stream(EXECUTE_STREAM)
        self._metadata = self._connection.names.next()
        traced = self._span.metadata if self._span is not None else ()
        self._call = open_stream(metadata=(*self._metadata, *traced))
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            self._fail(CancelledError("the stream was cancelled", rule="stream_open"))
            self._call.cancel()
        await self.close()

    async def submit(self, *inputs: Any, out: Any = None, **named: Any) -> asyncio.Future[Any]:
        """Send an execution and return its future. Waits only while ``max_pending`` executions have no result."""
        client = self._client
        if len(inputs) == 1 and isinstance(inputs[0], Bound):
            load = await client._drive(inputs[0]._state.sendable)
        else:
            load = await client._drive(self._plan.load, inputs, out, named)
        if load.cargo.tensors:
            await asyncio.to_thread(load.cargo.fence)
        await self._room.acquire()
        if (
            self._call is None
            or self._closing
            or self._error is not None
            or load.session is not self._connection.session
        ):
            self._room.release()
            raise self._error or UnavailableError("the stream is closed", field="stream", rule="stream_open")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._batches.pending.append((load, future))
        self._last = future
        self._wake.set()
        return future

    async def drain(self) -> None:
        """Wait until everything that was submitted has its result."""
        if self._last is not None:
            await asyncio.wait([self._last])

    async def close(self) -> None:
        """Wait for all executions and end the stream. Idempotent."""
        first, self._closing = not self._closing, True
        self._wake.set()
        await asyncio.gather(*self._tasks)
        if first and self._tasks:
            self._connection.release()

    async def _write(self) -> None:
        batches = self._batches
        try:
            while self._error is None:
                while batches.ready:
                    await self._call.write(batches.take())
                if self._closing and not batches.pending:
                    break
                self._wake.clear()
                if not batches.ready:
                    await self._wake.wait()
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            return  # the reader sees it too, and says why

    async def _read(self) -> None:
        error: TilewrightError | None = None
        try:
            async for data in self._call:
                done = self._batches.answered(dispatch_pb2.ExecuteReply.FromString(data))
                self._wake.set()
                for future, result in done:
                    self._settle(future, result)
        except grpc.RpcError as failure:
            error = named(call_failed(self._client._subject, self._connection.session, failure), self._metadata)
        except asyncio.CancelledError:
            error = CancelledError("the stream was cancelled", rule="stream_open")
        except Exception as failure:
            error = UnavailableError(f"the stream broke: {failure}", field="stream", rule="stream_open")
            self._call.cancel()
        if self._span is not None:
            self._span.end(error)
        self._fail(error or UnavailableError("the stream is over", field="stream", rule="stream_open"))
        self._wake.set()

    def _fail(self, error: TilewrightError) -> None:
        self._error = self._error or not_sent(error)
        rest = self._batches.abandon(error)
        if rest:
            self._client._subject.quarantine([load.cargo for load, _, _ in rest])
        for _, future, failed in rest:
            self._settle(future, failed)

    def _settle(self, future: asyncio.Future[Any], result: Any) -> None:
        self._room.release()
        if future.done():
            return
        if isinstance(result, TilewrightError):
            future.set_exception(result)
        else:
            future.set_result(result)

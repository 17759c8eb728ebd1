"""The asyncio client: the same methods as the blocking one, awaitable.

    >>> async with connect() as client:  # doctest: +SKIP
    ...     c = await client.gemm(a, b)

A client belongs to the event loop that it was opened in, and to the process: a forked child makes its own.
"""

from __future__ import annotations

import asyncio
import os
import warnings
import weakref
from collections.abc import Coroutine, Generator, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from tilewright import arrays, catalog, dispatch, plans, resident
from tilewright import gemm as _gemm
from tilewright import settings as _settings
from tilewright.batching import Batcher
from tilewright.core import Core, Session, check_timeout
from tilewright.driving import awaiting, awaiting_as
from tilewright.errors import CancelledError, InvalidArgumentError, TilewrightError, UnavailableError
from tilewright.planbase import PlanBase
from tilewright.plans import BoundState, PlanState
from tilewright.report import Report
from tilewright.resident import BufferState
from tilewright.steps import EXECUTE_STREAM, OPEN_SESSION, Flow, Rpc
from tilewright.transport import (
    CHANNEL_OPTIONS,
    call_failed,
    closed_during_call,
    lease_ended,
    no_server,
    open_request,
    opened,
    serialised,
)
from tilewright_proto.v1 import dispatch_pb2

__all__ = ["Bound", "Buffer", "Client", "Kernels", "Plan", "Stream", "connect"]

T = TypeVar("T")


class _Connection:
    def __init__(self, core: Core) -> None:
        self.core = core
        self.pid = os.getpid()
        self.channel = grpc.aio.insecure_channel(core.target, options=CHANNEL_OPTIONS)
        self.calls: dict[str, Any] = {}
        self.posted: set[Any] = set()
        self.lease: Any = None
        self.session: Session

    async def open(self, timeout: float) -> None:
        core = self.core
        try:
            self.lease = self.channel.unary_stream(OPEN_SESSION)(open_request(core.name))
            try:
                first = await asyncio.wait_for(self.lease.read(), timeout)
            except grpc.RpcError as error:
                raise no_server(core.target, error, timeout) from None
            except asyncio.TimeoutError:
                raise UnavailableError(
                    f"no Tilewright server answers at {core.target} within {timeout:g} s", rule="server_reachable"
                ) from None
            if first is grpc.aio.EOF:
                raise no_server(core.target, None, timeout)
            self.session = opened(first)
        except BaseException:
            await self.channel.close()
            raise
        session = self.session
        # The callback runs when the call is done, so neither of the two waits.
        self.lease.add_done_callback(lambda _: lease_ended(session, None, "the connection ended"))

    def unary(self, path: str) -> Any:
        call = self.calls.get(path)
        if call is None:
            call = self.calls[path] = self.channel.unary_unary(path)
        return call

    async def close(self) -> None:
        self.lease.cancel()
        await self.channel.close()


class Client:
    """A session with a server. Made by ``connect``. Methods are those of the blocking ``tilewright.Client``,
    awaitable.
    """

    def __init__(self, core: Core, timeout: float) -> None:
        self._subject = core
        self._open_timeout = timeout
        self._connection: _Connection | None = None
        self.kernels = Kernels(self)

    gemm = awaiting(_gemm.gemm)
    grouped_gemm = awaiting(_gemm.grouped_gemm)
    pack_b = awaiting(_gemm.pack_b)
    run = awaiting(dispatch.run)
    explain = awaiting(dispatch.explain)
    empty = awaiting(arrays.empty)
    zeros = awaiting(arrays.zeros)
    asarray = awaiting(arrays.asarray)

    plan = awaiting_as(plans.prepare, lambda self, state: Plan(self, state))
    plan_gemm = awaiting_as(_gemm.plan_gemm, lambda self, state: Plan(self, state))

    async def buffer(self, nbytes: int, device: str | None = None) -> Buffer:
        """Memory that the server keeps for this session."""
        return Buffer(self, await self._drive(resident.create(self._subject, nbytes, device)))

    @property
    def report(self) -> Report | None:
        """What the call that was awaited last did. Read it before awaiting anything else."""
        return self._subject.report

    @property
    def target(self) -> str:
        return self._subject.target

    @property
    def session(self) -> Session:
        """The session. Raises ``UnavailableError`` if it is over."""
        return self._subject.require()

    @property
    def closed(self) -> bool:
        return self._subject.closed

    async def open(self) -> Client:
        """Open the session; done by ``await connect()`` and ``async with``."""
        if self._connection is None:
            connection = _Connection(self._subject)
            await connection.open(self._open_timeout)
            self._connection = connection
            self._subject.session = connection.session
        return self

    async def reconnect(self) -> None:
        """Open a new session, after the server was restarted. Arrays stay valid; plans are prepared again when they
        are used; buffers are gone.
        """
        if self._subject.closed:
            self._subject.require()
        old, self._connection = self._connection, None
        if old is not None:
            await old.close()
        await self.open()

    async def close(self) -> None:
        """End the session. Arrays stay readable. Idempotent."""
        self._subject.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def __aenter__(self) -> Client:
        return await self.open()

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        await self.close()

    def __del__(self) -> None:
        if getattr(self, "_connection", None) is not None:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<tilewright.aio.Client {self._subject.target}{' closed' if self.closed else ''}>"

    async def _drive(self, flow: Flow[T]) -> T:
        connection = self._connected()
        for release in self._subject.take_releases():
            call = connection.unary(release.method.path)(serialised(release.request), timeout=release.timeout)
            connection.posted.add(call)
            call.add_done_callback(connection.posted.discard)
        try:
            step = next(flow)
            while True:
                try:
                    reply = await self._call(connection, step)
                except BaseException as error:  # noqa: PERF203
                    step = flow.throw(error)
                else:
                    step = flow.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _connected(self) -> _Connection:
        connection = self._connection
        if connection is None:
            self._subject.require()
            raise UnavailableError(
                "the client is not open", rule="client_open", fix="use `async with`, or await open()"
            )
        if connection.pid != os.getpid():
            raise UnavailableError(
                "this client belongs to the process that forked", rule="client_open", fix="connect in the child"
            )
        return connection

    async def _call(self, connection: _Connection, step: Rpc) -> Any:
        method = step.method
        try:
            if not method.streams:
                return method.parse(await connection.unary(method.path)(serialised(step.request), timeout=step.timeout))
            messages = []
            stream = connection.channel.unary_stream(method.path)(serialised(step.request), timeout=step.timeout)
            try:
                async for data in stream:
                    messages.append(method.parse(data))
                    if step.on_event is not None:
                        step.on_event(messages[-1])
            finally:
                stream.cancel()
            return messages
        except grpc.RpcError as error:
            raise call_failed(self._subject, connection.session, error) from None
        except grpc.aio.UsageError as error:
            raise closed_during_call(error) from None


class Kernels:
    """The server's catalog of kernels: ``client.kernels``."""

    def __init__(self, client: Client) -> None:
        self._client: Client = weakref.proxy(client)
        self._subject = client._subject

    async def _drive(self, flow: Flow[T]) -> T:
        return await self._client._drive(flow)

    list = awaiting(catalog.list_kernels)
    sets = awaiting(catalog.kernel_sets)
    describe = awaiting(catalog.describe)
    validate = awaiting(catalog.validate)
    correct = awaiting(catalog.correct)
    build = awaiting(catalog.build)
    export = awaiting(catalog.export)
    statistics = awaiting(catalog.statistics)


class Buffer:
    """A resident buffer. An async context manager that frees it."""

    def __init__(self, client: Client, state: BufferState) -> None:
        self._client = client
        self._subject = state

    async def _drive(self, flow: Flow[T]) -> T:
        return await self._client._drive(flow)

    write = awaiting(resident.write)
    read = awaiting(resident.read)
    free = awaiting(resident.free)

    @property
    def nbytes(self) -> int:
        return self._subject.nbytes

    @property
    def device(self) -> str:
        return self._subject.device

    def tensor(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> resident.ResidentTensor:
        """The bytes from ``offset`` as a contiguous tensor, usable as an operand."""
        return resident.tensor(self._subject, shape, dtype, offset)

    async def __aenter__(self) -> Buffer:
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        await self.free()


class Plan(PlanBase):
    """A prepared plan; see ``tilewright.Plan``."""

    def __init__(self, client: Client, state: PlanState) -> None:
        super().__init__(state)
        self._client = client

    async def __call__(
        self, *inputs: Any, out: Any = None, repeat: int = 1, timeout: float | None = None, **named: Any
    ) -> Any:
        """Run it."""
        return await self._client._drive(self._state.execute(inputs, out, named, repeat, timeout))

    async def run_many(self, calls: Sequence[Any], *, timeout: float | None = None) -> list[Any]:
        """Run many executions in one message."""
        states = [call._state if isinstance(call, Bound) else call for call in calls]
        return await self._client._drive(self._state.execute_many(states, timeout))

    async def bind(self, *inputs: Any, out: Any = None, **named: Any) -> Bound:
        """The plan with its arrays, which must be in shared memory in the planned layout."""
        return Bound(self._client, await self._client._drive(BoundState(self._state, inputs, out, named).bind()))

    def stream(self, *, max_pending: int = 4096, timeout: float | None = None) -> Stream:
        """A stream for many executions in flight; use it with ``async with``."""
        return Stream(self._client, self._state, max_pending, timeout)

    async def __aenter__(self) -> Plan:
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


class Bound:
    """A plan bound to arrays; ``await bound()`` runs it."""

    def __init__(self, client: Client, state: BoundState) -> None:
        self._client = client
        self._state = state

    async def __call__(self, *, timeout: float | None = None) -> Any:
        return await self._client._drive(self._state.execute(timeout))

    @property
    def out(self) -> Any:
        """The output array (several: a dict)."""
        return self._state.result


class Stream:
    """Executions in order, many in flight; see ``tilewright.Stream``."""

    def __init__(self, client: Client, plan: PlanState, max_pending: int, timeout: float | None) -> None:
        limit = check_timeout(timeout)
        self._client = client
        self._plan = plan
        self._batches: Batcher[asyncio.Future[Any]] = Batcher(max(1, round(limit * 1000)) if limit else 0)
        self._room = asyncio.Semaphore(max(1, max_pending))
        self._wake = asyncio.Event()
        self._closing = False
        self._error: TilewrightError | None = None
        self._last: asyncio.Future[Any] | None = None
        self._connection: _Connection
        self._tasks: list[asyncio.Task[None]] = []
        self._call: Any = None

    async def __aenter__(self) -> Stream:
        await self._client._drive(self._plan.live())
        self._connection = self._client._connected()
        self._call = self._connection.channel.stream_stream(EXECUTE_STREAM)()
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
            load = await client._drive(inputs[0]._state.loaded())
        else:
            load = await client._drive(self._plan.load(inputs, out, named))
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
        self._closing = True
        self._wake.set()
        await asyncio.gather(*self._tasks)

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
            error = call_failed(self._client._subject, self._connection.session, failure)
        except asyncio.CancelledError:
            error = CancelledError("the stream was cancelled", rule="stream_open")
        except Exception as failure:
            error = UnavailableError(f"the stream broke: {failure}", field="stream", rule="stream_open")
            self._call.cancel()
        self._fail(error or UnavailableError("the stream is over", field="stream", rule="stream_open"))
        self._wake.set()

    def _fail(self, error: TilewrightError) -> None:
        self._error = self._error or error
        rest = self._batches.abandon()
        if rest:
            self._client._subject.quarantine([load.cargo.keep for load, _ in rest])
        for _, future in rest:
            self._settle(future, self._error)

    def _settle(self, future: asyncio.Future[Any], result: Any) -> None:
        self._room.release()
        if future.done():
            return
        if isinstance(result, TilewrightError):
            future.set_exception(result)
        else:
            future.set_result(result)


class _Connecting:
    """What ``connect`` returns: to be awaited, or used with ``async with``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __await__(self) -> Generator[Any, None, Client]:
        opening: Coroutine[Any, Any, Client] = self._client.open()
        return opening.__await__()

    async def __aenter__(self) -> Client:
        return await self._client.open()

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        await self._client.close()


def connect(
    target: str | None = None,
    *,
    timeout: float = 10.0,
    call_timeout: float | None = 300.0,
    name: str | None = None,
) -> _Connecting:
    """Open a session: ``async with connect() as client`` or ``client = await connect()``. Arguments and errors as for
    ``tilewright.connect``.
    """
    place = _settings.default_target() if target is None else _settings.normalise_target(target)
    wait = check_timeout(timeout)
    if wait is None:
        raise InvalidArgumentError(
            "waiting for ever is not offered", field="timeout", rule="timeout_range", fix="give seconds"
        )
    return _Connecting(Client(Core(place, name or f"python-{os.getpid()}", check_timeout(call_timeout)), wait))

"""The asyncio client; see ``tilewright.aio``."""

from __future__ import annotations

import asyncio
import os
import warnings
import weakref
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, ParamSpec, TypeVar

import grpc
import grpc.aio

from tilewright.aio.connection import Connection
from tilewright.aio.kv_cache import KVCache
from tilewright.aio.plan import Pipeline, Plan
from tilewright.dispatch import run as dispatch
from tilewright.dispatch.plans import plan as plans
from tilewright.errors import UnavailableError
from tilewright.operations import conv as _conv
from tilewright.operations import gemm as _gemm
from tilewright.operations import kernels as catalog
from tilewright.operations import moe as _moe
from tilewright.operations.attention import calls as _attention
from tilewright.operations.attention import kv_append as _kv_append
from tilewright.operations.attention import kv_cache as _kv_cache
from tilewright.session.grpc import (
    call_failed,
    call_local,
    channel_closed,
    serialised,
)
from tilewright.session.recovery import surviving
from tilewright.session.state import Core, Session, opening
from tilewright.session.tls import Tls
from tilewright.tensor import device_array, resident
from tilewright.tensor import export as exports
from tilewright.tensor import shared as arrays
from tilewright.tensor.resident import BufferState
from tilewright.transport.drive import awaiting, awaiting_as
from tilewright.transport.request_ids import Metadata, named
from tilewright.transport.rpc import Flow, Rpc, Wait, Work
from tilewright.transport.tracing import CallSpan, call_span
from tilewright.types.arguments import Placement, Priority
from tilewright.types.report import Report

__all__ = ["Buffer", "Client", "Kernels", "connect"]

P = ParamSpec("P")
T = TypeVar("T")


class Client:
    """A session with a server. Made by ``connect``. Methods are those of the blocking ``tilewright.Client``,
    awaitable.
    """

    def __init__(self, core: Core, timeout: float) -> None:
        self._subject = core
        self._open_timeout = timeout
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._retired: weakref.WeakSet[Connection] = weakref.WeakSet()
        """Connections that may have calls under way still."""
        self.kernels = Kernels(self)

    gemm = awaiting(_gemm.gemm)
    grouped_gemm = awaiting(_gemm.grouped_gemm)
    pack_b = awaiting(_gemm.pack_b)
    moe_gemm = awaiting(_moe.moe_gemm)
    conv = awaiting(_conv.conv)
    conv_backward_data = awaiting(_conv.conv_backward_data)
    conv_backward_weight = awaiting(_conv.conv_backward_weight)
    conv_transpose = awaiting(_conv.conv_transpose)
    attention = awaiting(_attention.attention)
    attention_varlen = awaiting(_attention.attention_varlen)
    attention_paged = awaiting(_attention.attention_paged)
    attention_backward = awaiting(_attention.attention_backward)
    kv_append = awaiting(_kv_append.kv_append)
    run = awaiting(dispatch.run)
    explain = awaiting(dispatch.explain)
    empty = awaiting(arrays.empty)
    zeros = awaiting(arrays.zeros)
    asarray = awaiting(arrays.asarray)

    plan = awaiting_as(plans.prepare, Plan)
    plan_gemm = awaiting_as(_gemm.plan_gemm, Plan)
    plan_moe_gemm = awaiting_as(_moe.plan_moe_gemm, Plan)
    plan_conv = awaiting_as(_conv.plan_conv, Plan)
    plan_conv_backward_data = awaiting_as(_conv.plan_conv_backward_data, Plan)
    plan_conv_backward_weight = awaiting_as(_conv.plan_conv_backward_weight, Plan)
    plan_conv_transpose = awaiting_as(_conv.plan_conv_transpose, Plan)
    plan_attention = awaiting_as(_attention.plan_attention, Plan)
    plan_attention_varlen = awaiting_as(_attention.plan_attention_varlen, Plan)
    plan_attention_paged = awaiting_as(_attention.plan_attention_paged, Plan)
    plan_attention_backward = awaiting_as(_attention.plan_attention_backward, Plan)
    plan_kv_append = awaiting_as(_kv_append.plan_kv_append, Plan)

    device_empty = awaiting(device_array.device_empty)
    kv_cache = awaiting_as(_kv_cache.create, KVCache)
    release_exports = awaiting(exports.forget_exports)

    def pipeline(self, stream: Any = None) -> Pipeline:
        """Many launches of bound plans on one stream of a GPU: ``async with client.pipeline() as p: await
        p.launch(bound)``.
        """
        return Pipeline(self, stream)

    async def buffer(self, nbytes: int, device: str | None = None) -> Buffer:
        """Memory that the server keeps for this session."""
        return Buffer(self, await self._drive(resident.create, self._subject, nbytes, device))

    @property
    def report(self) -> Report | None:
        """Report of the call that was awaited last. Read it before awaiting anything else."""
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
        await self._renewed(self._connection, self._open_timeout)
        return self

    async def reconnect(self) -> None:
        """Open a new session now; see ``tilewright.Client.reconnect``."""
        if self._connection is not None:
            session = self._connection.session
            session.lost = session.lost or "another one was asked for"
        await self.open()

    async def close(self) -> None:
        """End the session. Arrays stay readable. Idempotent."""
        self._subject.close()
        connection, self._connection = self._connection, None
        for item in (*self._retired, *filter(None, (connection,))):
            await item.close()

    async def __aenter__(self) -> Client:
        return await self.open()

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        await self.close()

    def __del__(self) -> None:
        if getattr(self, "_connection", None) is not None:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<tilewright.aio.Client {self._subject.target}{' closed' if self.closed else ''}>"

    async def _drive(self, flow: Callable[P, Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        connection = self._connected().use()
        limit: Any = kwargs.get("timeout")
        steps = surviving(self._subject, partial(flow, *args, **kwargs), limit, self._open_timeout)
        try:
            for release in self._subject.take_releases():
                call = connection.unary(release.method.path)(serialised(release.request), timeout=release.timeout)
                connection.posted.add(call)
                call.add_done_callback(connection.posted.discard)
            step = next(steps)
            while True:
                try:
                    if isinstance(step, Rpc):
                        reply = await self._call(connection, step)
                    elif isinstance(step, Work):
                        reply = await asyncio.to_thread(step.function)
                    elif isinstance(step, Wait):
                        await asyncio.sleep(step.seconds)
                        reply = None
                    else:
                        used, reply = connection, None
                        connection = (await self._renewed(used, step.seconds)).use()
                        used.release()
                except BaseException as error:  # noqa: PERF203
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            connection.release()

    async def _renewed(self, used: Connection | None, seconds: float) -> Connection:
        """The connection as it is now; another one in place of ``used`` if the session of that is over."""
        async with self._opening:
            current = self._connection
            if current is not None and (current is not used or not current.session.lost):
                return current
            if self._subject.closed:
                self._subject.require()
            made = Connection(self._subject)
            await made.open(min(seconds, self._open_timeout))
            if self._subject.closed:
                await made.close()
                self._subject.require()
            self._connection = made
            self._subject.adopt(made.session)
            if current is not None:
                self._retired.add(current)
                current.retire()
            return made

    def _connected(self) -> Connection:
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

    async def _call(self, connection: Connection, step: Rpc) -> Any:
        method = step.method
        if step.local:
            return await asyncio.to_thread(call_local, connection.session, step)
        metadata = connection.names.next()
        try:
            if not method.streams:
                span = call_span(method.path)
                if span is not None:
                    return await self._traced(connection, step, span, metadata)
                ask = connection.unary(method.path)
                reply = await ask(serialised(step.request), timeout=step.timeout, metadata=metadata)
                return method.parse(reply)
            messages = []
            begin = connection.channel.unary_stream(method.path)
            stream = begin(serialised(step.request), timeout=step.timeout, metadata=metadata)
            try:
                async for data in stream:
                    messages.append(method.parse(data))
                    if step.on_event is not None:
                        step.on_event(messages[-1])
            finally:
                stream.cancel()
            return messages
        except grpc.RpcError as error:
            raise named(call_failed(self._subject, connection.session, error, method), metadata) from None
        except grpc.aio.UsageError as error:
            raise channel_closed(self._subject, connection.session, error) from None

    @staticmethod
    async def _traced(connection: Connection, step: Rpc, span: CallSpan, metadata: Metadata) -> Any:
        try:
            ask = connection.unary(step.method.path)
            reply = await ask(serialised(step.request), timeout=step.timeout, metadata=(*metadata, *span.metadata))
        except BaseException as error:
            span.end(error)
            raise
        span.end()
        return step.method.parse(reply)


class Kernels:
    """The server's catalog of kernels: ``client.kernels``."""

    def __init__(self, client: Client) -> None:
        self._client: Client = weakref.proxy(client)
        self._subject = client._subject

    async def _drive(self, flow: Callable[P, Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._client._drive(flow, *args, **kwargs)

    list = awaiting(catalog.list_kernels)
    sets = awaiting(catalog.kernel_sets)
    describe = awaiting(catalog.describe)
    validate = awaiting(catalog.validate)
    correct = awaiting(catalog.correct)
    register = awaiting(catalog.register)
    unregister = awaiting(catalog.unregister)
    build = awaiting(catalog.build)
    export = awaiting(catalog.export)
    statistics = awaiting(catalog.statistics)


class Buffer:
    """A resident buffer. An async context manager that frees it."""

    def __init__(self, client: Client, state: BufferState) -> None:
        self._client = client
        self._subject = state

    async def _drive(self, flow: Callable[P, Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._client._drive(flow, *args, **kwargs)

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


class _Connecting:
    """Result of ``connect``: to be awaited, or used with ``async with``."""

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
    launch: Placement = "auto",
    reconnect: bool = True,
    retries: int = 5,
    priority: Priority = "interactive",
    start: bool | None = None,
    tls: Tls | None = None,
) -> _Connecting:
    """Open a session: ``async with connect() as client`` or ``client = await connect()``. Arguments and errors as for
    ``tilewright.connect``.
    """
    return _Connecting(
        Client(*opening(target, timeout, call_timeout, name, launch, reconnect, retries, priority, start, tls))
    )

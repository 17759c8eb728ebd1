"""The blocking client."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import grpc

from tilewright.dispatch import run as dispatch
from tilewright.dispatch.plans import plan as plans
from tilewright.operations import conv as _conv
from tilewright.operations import gemm as _gemm
from tilewright.operations import kernels as catalog
from tilewright.operations import moe as _moe
from tilewright.operations.attention import calls as _attention
from tilewright.operations.attention import kv_append as _kv_append
from tilewright.operations.attention import kv_cache as _kv_cache
from tilewright.session import settings as _settings
from tilewright.session.grpc import (
    call_failed,
    call_local,
    channel_closed,
    no_fork_support,
    serialised,
)
from tilewright.session.recovery import surviving
from tilewright.session.state import Core, Session, opening
from tilewright.session.tls import Tls
from tilewright.sync.connection import Connection
from tilewright.sync.kv_cache import KVCache
from tilewright.sync.pipeline import Pipeline
from tilewright.sync.plan import Plan
from tilewright.tensor import device_array, resident
from tilewright.tensor import export as exports
from tilewright.tensor import shared as arrays
from tilewright.tensor.resident import BufferState
from tilewright.transport.drive import blocking, blocking_as
from tilewright.transport.request_ids import Metadata, named
from tilewright.transport.rpc import Flow, Rpc, Wait, Work
from tilewright.transport.tracing import CallSpan, call_span
from tilewright.types.arguments import Placement, Priority
from tilewright.types.report import Report

__all__ = ["Buffer", "Client", "Kernels", "connect"]

P = ParamSpec("P")
T = TypeVar("T")


class Client:
    """A session with a server, for one process. Made by ``connect``; a context manager. Thread-safe.

    In a forked child the client connects anew on its first use there: arrays made before the fork can still be passed
    (they are copied), arrays made after it are shared with the server as usual, plans are prepared again, and
    resident buffers stay the parent's.
    """

    def __init__(self, core: Core, timeout: float) -> None:
        self._subject = core
        self._open_timeout = timeout
        self._lock = threading.Lock()
        self._forked = False
        self._connection: Connection | None = None
        self._retired: weakref.WeakSet[Connection] = weakref.WeakSet()
        """Connections that may have calls under way still."""
        self._connected()
        self.kernels = Kernels(self)
        _CLIENTS.add(self)

    # ---- operations ----

    gemm = blocking(_gemm.gemm)
    grouped_gemm = blocking(_gemm.grouped_gemm)
    pack_b = blocking(_gemm.pack_b)
    moe_gemm = blocking(_moe.moe_gemm)
    conv = blocking(_conv.conv)
    conv_backward_data = blocking(_conv.conv_backward_data)
    conv_backward_weight = blocking(_conv.conv_backward_weight)
    conv_transpose = blocking(_conv.conv_transpose)
    attention = blocking(_attention.attention)
    attention_varlen = blocking(_attention.attention_varlen)
    attention_paged = blocking(_attention.attention_paged)
    attention_backward = blocking(_attention.attention_backward)
    kv_append = blocking(_kv_append.kv_append)
    run = blocking(dispatch.run)
    explain = blocking(dispatch.explain)
    plan = blocking_as(plans.prepare, Plan)
    plan_gemm = blocking_as(_gemm.plan_gemm, Plan)
    plan_moe_gemm = blocking_as(_moe.plan_moe_gemm, Plan)
    plan_conv = blocking_as(_conv.plan_conv, Plan)
    plan_conv_backward_data = blocking_as(_conv.plan_conv_backward_data, Plan)
    plan_conv_backward_weight = blocking_as(_conv.plan_conv_backward_weight, Plan)
    plan_conv_transpose = blocking_as(_conv.plan_conv_transpose, Plan)
    plan_attention = blocking_as(_attention.plan_attention, Plan)
    plan_attention_varlen = blocking_as(_attention.plan_attention_varlen, Plan)
    plan_attention_paged = blocking_as(_attention.plan_attention_paged, Plan)
    plan_attention_backward = blocking_as(_attention.plan_attention_backward, Plan)
    plan_kv_append = blocking_as(_kv_append.plan_kv_append, Plan)

    # ---- memory ----

    empty = blocking(arrays.empty)
    zeros = blocking(arrays.zeros)
    asarray = blocking(arrays.asarray)

    def buffer(self, nbytes: int, device: str | None = None) -> Buffer:
        """Memory that the server keeps for this session, on a device (the server's default). Freed by ``free``, or
        when the last reference goes.
        """
        return Buffer(self, self._drive(resident.create, self._subject, nbytes, device))

    device_empty = blocking(device_array.device_empty)
    kv_cache = blocking_as(_kv_cache.create, KVCache)
    release_exports = blocking(exports.forget_exports)

    # ---- launches ----

    def pipeline(self, stream: Any = None) -> Pipeline:
        """Many launches of bound plans on one stream of a GPU (the current one, at the first launch, of the library
        that made the output; on a CPU it means nothing): ``with client.pipeline() as p: p.launch(bound)``.
        """
        return Pipeline(self, stream)

    # ---- state ----

    @property
    def report(self) -> Report | None:
        """Report of the last call of this thread: kernels, timing, bytes copied."""
        return self._subject.report

    @property
    def target(self) -> str:
        """Where the server is."""
        return self._subject.target

    @property
    def session(self) -> Session:
        """The session: server version, device, operations, limits. Raises ``UnavailableError`` if it is over."""
        return self._subject.require()

    @property
    def closed(self) -> bool:
        return self._subject.closed

    def reconnect(self) -> None:
        """Open a new session now. Arrays stay valid; plans are prepared again when they are used; buffers are gone.
        Calls do so by themselves when the session is over, unless ``connect`` was told otherwise.
        """
        with self._lock:
            if self._subject.closed:
                self._subject.require()
            old = self._connection
            if old is not None:
                old.session.lost = old.session.lost or "another one was asked for"
        self._renewed(old, self._open_timeout)

    def close(self) -> None:
        """End the session: the server frees all that it holds for it. Arrays stay readable. Idempotent."""
        with self._lock:
            self._subject.close()
            connection, self._connection = self._connection, None
        for item in (*self._retired, *filter(None, (connection,))):
            item.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # At the end of the interpreter gRPC's threads are gone, and closing would wait for them for ever.
        if getattr(self, "_connection", None) is not None and not sys.is_finalizing():
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            self.close()

    def __repr__(self) -> str:
        return f"<tilewright.Client {self._subject.target}{' closed' if self.closed else ''}>"

    # ---- driving ----

    def _connected(self) -> Connection:
        return self._connection or self._renewed(None, self._open_timeout)

    def _renewed(self, used: Connection | None, seconds: float) -> Connection:
        """The connection as it is now; another one in place of ``used`` if the session of that is over."""
        with self._lock:
            current = self._connection
            if current is not None and (current is not used or not current.session.lost):
                return current
            if self._subject.closed:
                self._subject.require()
            if self._forked and not _settings.fork_support():
                raise no_fork_support()
            made = Connection(self._subject, min(seconds, self._open_timeout))
            self._connection = made
            self._subject.adopt(made.session)
            if current is not None:
                self._retired.add(current)
                current.retire()
            return made

    def _drive(self, flow: Callable[P, Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        connection = self._connected()
        for release in self._subject.take_releases():
            self._post(connection, release)
        limit: Any = kwargs.get("timeout")
        steps = surviving(self._subject, partial(flow, *args, **kwargs), limit, self._open_timeout)
        try:
            step = next(steps)
            while True:
                try:
                    if isinstance(step, Rpc):
                        reply = self._call(connection, step)
                    elif isinstance(step, Work):
                        reply = step.function()
                    elif isinstance(step, Wait):
                        time.sleep(step.seconds)
                        reply = None
                    else:
                        connection = self._renewed(connection, step.seconds)
                        reply = None
                except BaseException as error:  # noqa: PERF203
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _call(self, connection: Connection, call: Rpc) -> Any:
        method = call.method
        if call.local:
            return call_local(connection.session, call)
        metadata = connection.names.next()
        try:
            if not method.streams:
                span = call_span(method.path)
                if span is not None:
                    return self._traced(connection, call, span, metadata)
                ask = connection.unary(method.path)
                return method.parse(ask(serialised(call.request), timeout=call.timeout, metadata=metadata))
            messages = []
            begin = connection.channel.unary_stream(method.path)
            stream = begin(serialised(call.request), timeout=call.timeout, metadata=metadata)
            try:
                for data in stream:
                    messages.append(method.parse(data))
                    if call.on_event is not None:
                        call.on_event(messages[-1])
            finally:
                stream.cancel()
            return messages
        except grpc.RpcError as error:
            raise named(call_failed(self._subject, connection.session, error, method), metadata) from None
        except ValueError as error:
            raise channel_closed(self._subject, connection.session, error) from None

    @staticmethod
    def _traced(connection: Connection, call: Rpc, span: CallSpan, metadata: Metadata) -> Any:
        try:
            ask = connection.unary(call.method.path)
            reply = ask(serialised(call.request), timeout=call.timeout, metadata=(*metadata, *span.metadata))
        except BaseException as error:
            span.end(error)
            raise
        span.end()
        return call.method.parse(reply)

    def _post(self, connection: Connection, call: Rpc) -> None:
        """Send a call whose reply does not matter."""
        try:
            future = connection.unary(call.method.path).future(serialised(call.request), timeout=call.timeout)
        except (grpc.RpcError, ValueError):
            return
        # The callback keeps the call from being cancelled as garbage.
        future.add_done_callback(lambda _: None)

    def _after_fork(self) -> None:
        self._forked = True
        self._lock = threading.Lock()
        if self._connection is not None:
            # gRPC's threads are not in this process: the parent's channel must be neither used nor closed here.
            _PARENTS.append(self._connection)
            self._connection = None
        self._subject.after_fork()


class Kernels:
    """The server's catalog of kernels: ``client.kernels``."""

    def __init__(self, client: Client) -> None:
        self._client = weakref.proxy(client)
        self._subject = client._subject

    def _drive(self, flow: Callable[P, Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._client._drive(flow, *args, **kwargs)
        return result

    list = blocking(catalog.list_kernels)
    sets = blocking(catalog.kernel_sets)
    describe = blocking(catalog.describe)
    validate = blocking(catalog.validate)
    correct = blocking(catalog.correct)
    register = blocking(catalog.register)
    unregister = blocking(catalog.unregister)
    build = blocking(catalog.build)
    export = blocking(catalog.export)
    statistics = blocking(catalog.statistics)


class Buffer:
    """A resident buffer. A context manager that frees it."""

    def __init__(self, client: Client, state: BufferState) -> None:
        self._client = client
        self._subject = state

    def _drive(self, flow: Callable[P, Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._client._drive(flow, *args, **kwargs)

    write = blocking(resident.write)
    read = blocking(resident.read)
    free = blocking(resident.free)

    @property
    def nbytes(self) -> int:
        return self._subject.nbytes

    @property
    def device(self) -> str:
        return self._subject.device

    def tensor(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> resident.ResidentTensor:
        """The bytes from ``offset`` as a contiguous tensor, usable as an operand. It keeps the buffer alive."""
        return resident.tensor(self._subject, shape, dtype, offset)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.free()


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
) -> Client:
    """Open a session with a server.

    ``target`` is ``unix:PATH``, a path, or ``HOST:PORT``; left out, ``$TILEWRIGHT_TARGET``, else the socket of
    ``tilewright serve`` for this user. If nothing listens on that socket and ``tilewright[server]`` is installed, the
    user's own server is started in the background; it ends after a quarter of an hour without a client, or by
    ``tilewright stop``. ``start=False``, or ``TILEWRIGHT_START=0``, starts none. ``timeout`` is how many seconds to
    wait for the server to answer, ``call_timeout`` the limit of calls that name none (``None``: no limit). ``name``
    shows in the server's status and log. ``launch`` says who launches: "caller" (this process, on its own memory and
    streams), "server", or "auto", this process where it can; see docs/launching.md. ``reconnect=False``: calls fail
    when the session is over, until ``Client.reconnect``. ``retries`` is how often a call is made again that the server
    refuses for the moment.
    ``tls`` has the files of TLS for a server elsewhere (``Tls``); left out, ``TILEWRIGHT_TLS_CA``, ``_CERTIFICATE``,
    ``_KEY`` and ``_TOKEN_FILE`` name them.
    ``priority`` is "interactive", "batch" or "background": on a busy server, batch gets a quarter and background a
    sixteenth of the time that interactive work gets.

    Raises ``UnavailableError`` if no server answers.

        >>> with connect() as client:  # doctest: +SKIP
        ...     c = client.gemm(a, b)
    """
    return Client(*opening(target, timeout, call_timeout, name, launch, reconnect, retries, priority, start, tls))


_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()
_PARENTS: list[Connection] = []


def _after_fork_in_child() -> None:
    for client in list(_CLIENTS):
        client._after_fork()


def _close_all() -> None:
    """While there are still threads: see ``Client.__del__``."""
    for client in list(_CLIENTS):
        with contextlib.suppress(Exception):
            client.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_close_all)

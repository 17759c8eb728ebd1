"""gRPC's event thread, and the way from it to ours: nothing that happens to one call ends it.

gRPC serves all calls by one thread, which an exception ends for good. Ours goes on: a call that could not be taken is
cancelled, and calls of every method are waited for again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
from grpc import _server as grpc_server

from tilewright_server.endpoints.rpc.access.peers import Peers
from tilewright_server.endpoints.rpc.transport.calls import WireCall
from tilewright_server.endpoints.rpc.transport.pace import Pace
from tilewright_server.endpoints.rpc.transport.traffic import Traffic
from tilewright_server.session.quotas import Quotas

__all__ = ["Entry", "Front", "start"]

log = logging.getLogger("tilewright.rpc")

POLL_S = 0.25
SOON_S = 0.01
"""Time between looks for calls that wait for their pace."""
_private: Any = grpc_server


class Entry:
    """Handler of a method: ``accept`` is called in the event thread with each call, and neither waits nor raises."""

    def __init__(self, method: str, accept: Callable[[WireCall], None], *, lasting: bool = False) -> None:
        """``lasting`` calls end when their client wants."""
        self.accept = accept
        self.method = method
        self.lasting = lasting


class _End:
    """The future of a call that gRPC wants, done when the call has ended."""

    def __init__(self, call: WireCall) -> None:
        self._call = call

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if not self._call.on_end(partial(callback, self)):
            callback(self)


class Front:
    """The server's thread pool, as far as gRPC can tell."""

    def __init__(self, quotas: Quotas, traffic: Traffic, peers: Peers, pace: Pace) -> None:
        self._quotas = quotas
        self._pace = pace
        self._traffic = traffic
        self._peers = peers
        self.begun = 0
        """Calls that have begun."""

    def submit(self, run: Callable[..., None], served: Any, event: Any, state: Any, entry: Entry, *rest: Any) -> _End:  # noqa: ARG002 - gRPC's signature
        """Begin a call. Runs in the event thread, and raises nothing."""
        self.begun += 1
        call = WireCall(event, state, self._quotas, self._traffic, self._peers, self._pace)
        try:
            call.method, call.lasting = entry.method, entry.lasting
            entry.accept(call)
        except BaseException as error:
            call.fail(error)
        return _End(call)


def start(server: grpc.Server, tick: Callable[[], bool]) -> None:
    """As ``server.start()``, with an event thread that nothing ends but the end of the server. It calls ``tick`` after
    each event, and a few times a second, or soon again if that says so.

    Raises ``RuntimeError`` if there is no thread for it.
    """
    state: Any = server._state
    begun = threading.Event()
    threading.Thread(target=_serve, args=(state, begun, tick), name="grpc", daemon=True).start()
    with state.lock:
        state.server.start()
        state.stage = _private._ServerStage.STARTED
        for method in state.registered_method_handlers:
            _private._request_registered_call(state, method)
        _private._request_call(state)
    begun.set()


def _serve(state: Any, begun: threading.Event, tick: Callable[[], bool]) -> None:
    begun.wait()
    soon = False
    while True:
        event = None
        try:
            event = state.completion_queue.poll(time.time() + (SOON_S if soon else POLL_S))
            soon = tick()
            if event.completion_type == grpc_server.cygrpc.CompletionType.queue_timeout:
                continue
            if not _private._process_event_and_continue(state, event):
                return
        except BaseException as error:
            with contextlib.suppress(BaseException):
                log.error("the event thread goes on after %r", error)
            with contextlib.suppress(BaseException):
                _mend(state, event)


def _mend(state: Any, event: Any) -> None:
    """Cancel the call that an event was of, and wait for calls of every method again."""
    call = getattr(event, "call", None)
    if call is not None:
        call.cancel()
    with state.lock:
        if state.stage is not _private._ServerStage.STARTED:
            return
        for method in state.registered_method_handlers:
            if method not in state.due:
                _private._request_registered_call(state, method)
        if _private._REQUEST_CALL_TAG not in state.due:
            _private._request_call(state)

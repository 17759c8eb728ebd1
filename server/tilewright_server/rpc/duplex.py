"""Both directions of a stream of requests and replies, with one wake-up per message instead of two.

The public interface of ``grpc`` waits for each reply to be sent and then for the next request to come: two trips
between the worker and gRPC's event thread, which cost more than a small kernel. gRPC itself takes both as one step.
That step is not public, so it is used only if everything it needs is there as expected; else the public interface is.
Both wait for the client to read before they take its next request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

__all__ = ["Duplex", "open_duplex"]

Send = Callable[[bytes], None]


class Duplex(Protocol):
    def exchange(self, reply: bytes | None, sent: Callable[[], None]) -> bytes | None:
        """Send ``reply``, call ``sent``, and wait for the next request; None when the client has sent its last or is
        gone.
        """
        ...


def open_duplex(requests: Iterator[bytes], send: Send, *, portable: bool = False) -> Duplex:
    """The best duplex for this version of ``grpc``."""
    if not portable and _one_step_is_possible(requests):
        return OneStepDuplex(requests)
    return PortableDuplex(requests, send)


class PortableDuplex:
    """By the public interface."""

    def __init__(self, requests: Iterator[bytes], send: Send) -> None:
        self._requests = requests
        self._send = send

    def exchange(self, reply: bytes | None, sent: Callable[[], None]) -> bytes | None:
        if reply is not None:
            self._send(reply)
        sent()
        try:
            return next(self._requests, None)
        except grpc.RpcError:
            return None


class OneStepDuplex:
    """By one batch of operations for the reply and the next request."""

    def __init__(self, requests: Any) -> None:
        from grpc import _server
        from grpc._cython import cygrpc

        self._server: Any = _server
        self._cygrpc: Any = cygrpc
        self._state = requests._state
        self._call = requests._call
        self._receive = cygrpc.ReceiveMessageOperation
        self._token: str = _server._RECEIVE_MESSAGE_TOKEN
        self._request: bytes | None = None

    def exchange(self, reply: bytes | None, sent: Callable[[], None]) -> bytes | None:
        state = self._state
        with state.condition:
            if not self._server._is_rpc_state_active(state):
                return None
            self._call.start_server_batch(self._operations(reply), self._completed)
            state.due.add(self._token)
        sent()  # not under the lock: it may end the stream, which takes locks of its own
        with state.condition:
            while self._token in state.due:
                state.condition.wait()
            return self._request

    def _operations(self, reply: bytes | None) -> tuple[Any, ...]:
        receive = self._receive(0)
        if reply is None:
            return (receive,)
        message = self._cygrpc.SendMessageOperation(reply, 0)
        if not self._state.initial_metadata_allowed:
            return (message, receive)
        self._state.initial_metadata_allowed = False
        return (self._server._get_initial_metadata_operation(self._state, None), message, receive)

    def _completed(self, event: Any) -> Any:
        """Runs in gRPC's event thread."""
        state = self._state
        self._request = event.batch_operations[-1].message()
        with state.condition:
            state.condition.notify_all()
            return self._server._possibly_finish_call(state, self._token)


def _one_step_is_possible(requests: Any) -> bool:
    try:
        from grpc import _server
        from grpc._cython import cygrpc
    except ImportError:
        return False
    needed = (
        (_server, "_is_rpc_state_active"),
        (_server, "_possibly_finish_call"),
        (_server, "_get_initial_metadata_operation"),
        (_server, "_RECEIVE_MESSAGE_TOKEN"),
        (cygrpc, "SendMessageOperation"),
        (cygrpc, "ReceiveMessageOperation"),
        (requests, "_state"),
        (requests, "_call"),
    )
    if not all(hasattr(owner, name) for owner, name in needed):
        return False
    parts = ("condition", "due", "initial_metadata_allowed")
    return all(hasattr(requests._state, part) for part in parts) and hasattr(requests._call, "start_server_batch")

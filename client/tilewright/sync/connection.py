"""One channel of the blocking client, with the stream that holds its session open."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import grpc

from tilewright.errors import ResourceExhaustedError
from tilewright.session.grpc import channel, heard, identified, lease_ended, no_server, open_request, opened
from tilewright.session.recovery import Patience
from tilewright.session.state import Core, Session
from tilewright.transport.request_ids import Names
from tilewright.transport.rpc import OPEN_SESSION, Flow

__all__ = ["Connection", "FlowRunner"]

P = ParamSpec("P")
T = TypeVar("T")


class Connection:
    """One channel, with the stream that holds the session open. It is closed with its last user at the latest."""

    def __init__(self, core: Core, timeout: float) -> None:
        self._pid = os.getpid()
        self._calls: dict[str, Any] = {}
        self.names = Names()
        """Ids of its calls."""
        patience = Patience(timeout, core.retries)
        while True:
            try:
                self._open(core, timeout)
            except ResourceExhaustedError as error:  # noqa: PERF203 - no session, no work
                pause = patience.before_opening(error)
                if pause is None:
                    raise
                time.sleep(pause)
            else:
                break
        session = self.session
        self.lease.add_done_callback(lambda call: lease_ended(session, call.code(), call.details()))
        session.listen = partial(_listen, self.lease, weakref.ref(session))

    def _open(self, core: Core, timeout: float) -> None:
        self.channel = channel(core.target, core.tls)
        try:
            with identified(core.target, core.priority) as metadata:
                named = (*metadata, *self.names.next())
                self.lease = self.channel.unary_stream(OPEN_SESSION)(open_request(core.name), metadata=named)
                self.session: Session = opened(self._first(core, timeout))
            self.session.open_local(core.target, core.timeout)
        except BaseException:
            self.channel.close()
            raise

    def _first(self, core: Core, timeout: float) -> bytes:
        """The lease's first message. It has no deadline, so that is waited for with an alarm."""
        alarm = threading.Timer(timeout, self.lease.cancel)
        alarm.daemon = True
        alarm.start()
        try:
            first: bytes = next(self.lease)
        except grpc.RpcError as error:
            raise no_server(core.target, error, timeout) from None
        except StopIteration:
            raise no_server(core.target, None, timeout) from None
        finally:
            alarm.cancel()
        return first

    def unary(self, path: str) -> Any:
        """The callable for a method, bytes to bytes."""
        call = self._calls.get(path)
        if call is None:
            call = self._calls[path] = self.channel.unary_unary(path)
        return call

    def retire(self) -> None:
        """Give the session up. Calls under way go on to their end."""
        self.lease.cancel()

    def close(self) -> None:
        self.lease.cancel()
        self.channel.close()

    def __del__(self) -> None:
        # In a forked child the channel is the parent's, and at the end of the interpreter gRPC's threads are gone.
        if hasattr(self, "channel") and self._pid == os.getpid() and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.channel.close()


def _listen(lease: Any, found: weakref.ref[Session]) -> None:
    """Hear the rest of a lease, in a thread that ends with it."""
    session = found()
    if session is not None:
        session.listen = _listening
        threading.Thread(target=_hear, args=(lease, session), name="tilewright-lease", daemon=True).start()


def _listening() -> None:
    """Does nothing: a thread listens already."""


def _hear(lease: Any, session: Session) -> None:
    with contextlib.suppress(grpc.RpcError):
        for data in lease:
            heard(session, data)


class FlowRunner(Protocol):
    """The client as its plans see it: it runs flows over its connection."""

    @property
    def _subject(self) -> Core: ...

    def _drive(self, flow: Callable[P, Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the flow that ``flow`` makes of the arguments, and return its result. ``timeout`` among them bounds how
        long a new session is waited for.
        """
        ...

    def _connected(self) -> Connection:
        """The connection, opened if need be."""
        ...

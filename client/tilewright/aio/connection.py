"""One channel of the asyncio client, with the stream that holds its session open."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import grpc
import grpc.aio

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
    """A channel and its lease. ``open`` connects it."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.pid = os.getpid()
        self.channel: Any = None
        self.calls: dict[str, Any] = {}
        self.names = Names()
        """Ids of its calls."""
        self.posted: set[Any] = set()
        self._users = 0
        self._retired = False
        self._closing: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[None] | None = None
        self.lease: Any = None
        self.session: Session

    async def open(self, timeout: float) -> None:
        """Connect. Raises ``UnavailableError``, and ``ResourceExhaustedError`` if that is not worth waiting out."""
        patience = Patience(timeout, self.core.retries)
        while True:
            try:
                await self._open(timeout)
            except ResourceExhaustedError as error:  # noqa: PERF203 - no session, no work
                pause = patience.before_opening(error)
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            else:
                break
        session = self.session
        session.listen = self._listen
        # The callback runs when the call is done, so neither of the two waits.
        self.lease.add_done_callback(lambda _: lease_ended(session, None, "the connection ended"))

    async def _open(self, timeout: float) -> None:
        core = self.core
        self.channel = channel(core.target, core.tls, grpc.aio)
        try:
            with identified(core.target, core.priority) as metadata:
                named = (*metadata, *self.names.next())
                self.lease = self.channel.unary_stream(OPEN_SESSION)(open_request(core.name), metadata=named)
                try:
                    first = await asyncio.wait_for(self.lease.read(), timeout)
                except (grpc.RpcError, asyncio.TimeoutError) as error:
                    raise no_server(core.target, error, timeout) from None
            if first is grpc.aio.EOF:
                raise no_server(core.target, None, timeout)
            self.session = opened(first)
            await asyncio.to_thread(self.session.open_local, core.target, core.timeout)
        except BaseException:
            await self.channel.close()
            raise

    def _listen(self) -> None:
        if self._hearing is None:
            self._hearing = asyncio.get_running_loop().create_task(self._hear())

    async def _hear(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            while (data := await self.lease.read()) is not grpc.aio.EOF:
                heard(self.session, data)

    def unary(self, path: str) -> Any:
        call = self.calls.get(path)
        if call is None:
            call = self.calls[path] = self.channel.unary_unary(path)
        return call

    def use(self) -> Connection:
        """Keep it open until ``release``."""
        self._users += 1
        return self

    def release(self) -> None:
        self._users -= 1
        self._close_unused()

    def retire(self) -> None:
        """Give the session up. Calls under way go on to their end, which closes the channel."""
        self._retired = True
        self.lease.cancel()
        self._close_unused()

    def _close_unused(self) -> None:
        if self._retired and not self._users and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.channel.close())

    async def close(self) -> None:
        self.lease.cancel()
        await (self._closing or self.channel.close())


class FlowRunner(Protocol):
    """The client as its plans see it: it runs flows over its connection."""

    @property
    def _subject(self) -> Core: ...

    async def _drive(self, flow: Callable[P, Flow[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the flow that ``flow`` makes of the arguments; see the blocking client's."""
        ...

    def _connected(self) -> Connection:
        """The connection. Raises ``UnavailableError`` if it is not open, or belongs to another process."""
        ...

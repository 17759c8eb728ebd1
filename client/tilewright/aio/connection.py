"""One channel of the asyncio client, with the stream that holds its session open."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from tilewright.session.grpc import CHANNEL_OPTIONS, identified, lease_ended, no_server, open_request, opened
from tilewright.session.state import Core, Session
from tilewright.transport.rpc import OPEN_SESSION, Flow

__all__ = ["Connection", "FlowRunner"]

T = TypeVar("T")


class Connection:
    """A channel and its lease. ``open`` connects it."""

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
            with identified(core.target) as process:
                self.lease = self.channel.unary_stream(OPEN_SESSION)(open_request(core.name), metadata=process)
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


class FlowRunner(Protocol):
    """The client as its plans see it: it runs flows over its connection."""

    @property
    def _subject(self) -> Core: ...

    async def _drive(self, flow: Flow[T]) -> T:
        """Run a flow and return its result."""
        ...

    def _connected(self) -> Connection:
        """The connection. Raises ``UnavailableError`` if it is not open, or belongs to another process."""
        ...

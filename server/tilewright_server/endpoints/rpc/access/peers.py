"""Callers over Unix sockets: the process at the other end of a connection, as the relay before gRPC knows it."""

from __future__ import annotations

import re
import threading

from tilewright_kit.types.errors import CancelledError
from tilewright_server.endpoints.rpc.relay import Relay
from tilewright_server.engine.client import Client
from tilewright_server.session.processes import kernel_client

__all__ = ["Peers"]

PEER = re.compile(r"unix-abstract:(tilewright-[0-9a-f]+)-([0-9a-f]+)")
"""A connection of a relay, as gRPC writes its name."""
MOST_KNOWN = 4096
"""Connections that are remembered; others are asked for again."""


class Peers:
    """Relays of a server, asked for the process behind a connection. Thread-safe."""

    def __init__(self) -> None:
        self._relays: dict[str, Relay] = {}
        self._lock = threading.Lock()
        self._known: dict[str, Client] = {}

    def add(self, relay: Relay) -> None:
        self._relays[relay.name] = relay

    def client(self, peer: str) -> Client | None:
        """The client of a call that came from ``peer``; None if that is no connection of a relay.

        Nothing that a client sends has a part in it: the name is given by the relay, and is never given again.
        Raises ``CancelledError`` if the connection has ended before its first call was looked at.
        """
        found = self._known.get(peer)
        if found is not None:
            return found
        match = PEER.fullmatch(peer)
        relay = self._relays.get(match[1]) if match else None
        if relay is None or match is None:
            return None
        process = relay.peer(int(match[2], 16))
        if process is None:
            raise CancelledError("the caller has gone away", rule="cancelled", fix="send it again over a connection")
        client = kernel_client(*process)
        with self._lock:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[peer] = client
        return client

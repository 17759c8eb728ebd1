"""Callers behind relays: the process, or the host and its certificate, at the other end of a connection."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilewright_kit.types.errors import CancelledError
from tilewright_server.clients.client import Client
from tilewright_server.endpoints.rpc.relay import Relay
from tilewright_server.session.processes import kernel_client

__all__ = ["Certificate", "Peers", "Remote"]

PEER = re.compile(r"unix-abstract:(tilewright-[0-9a-f]+)-([0-9a-f]+)")
"""A connection of a relay, as gRPC writes its name."""
MOST_KNOWN = 4096
"""Connections that are remembered; others are asked for again."""

Certificate = Mapping[str, Sequence[bytes]]
"""Properties of a connection as TLS proves them, under gRPC's names."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A host at the other end of a connection."""

    address: str
    """Address and port, as gRPC writes them."""
    certificate: Certificate | None
    """None without TLS."""


class Peers:
    """Relays of a server, asked for the other end of a connection. Thread-safe."""

    def __init__(self) -> None:
        self._relays: dict[str, tuple[Relay, Callable[[int], Certificate | None] | None]] = {}
        self._lock = threading.Lock()
        self._known: dict[str, Client | Remote] = {}

    def add(self, relay: Relay, certificate: Callable[[int], Certificate | None] | None = None) -> None:
        """``certificate`` knows the connections that a relay has adopted, by their tags; None if one has ended."""
        self._relays[relay.name] = relay, certificate

    def client(self, peer: str) -> Client | None:
        """The client of a call that came from ``peer``; None if that is no connection of a process to a relay.

        Nothing that a client sends has a part in it: the name is given by the relay, and is never given again.
        Raises ``CancelledError`` if the connection has ended before its first call was looked at.
        """
        found = self._find(peer)
        return found if isinstance(found, Client) else None

    def remote(self, peer: str) -> Remote | None:
        """The host that a call came from; None if ``peer`` is no connection of a host to a relay. Raises as
        ``client`` does."""
        found = self._find(peer)
        return found if isinstance(found, Remote) else None

    def _find(self, peer: str) -> Client | Remote | None:
        found = self._known.get(peer)
        if found is not None:
            return found
        match = PEER.fullmatch(peer)
        relay, certificate = self._relays.get(match[1], (None, None)) if match else (None, None)
        if relay is None or match is None:
            return None
        origin = relay.peer(int(match[2], 16))
        if origin is None:
            raise _gone()
        if not origin.address:
            found = kernel_client(origin.pid, origin.uid)
        elif certificate is None:
            found = Remote(origin.address, None)
        else:
            shown = certificate(origin.tag)
            if shown is None:
                raise _gone()
            found = Remote(origin.address, shown)
        with self._lock:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[peer] = found
        return found


def _gone() -> CancelledError:
    return CancelledError("the caller has gone away", rule="cancelled", fix="send it again over a connection")

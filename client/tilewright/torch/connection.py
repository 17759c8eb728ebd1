"""The client that operations of PyTorch go through: one for the process, connected at its first use."""

from __future__ import annotations

import threading

from tilewright.sync.client import Client, connect

__all__ = ["client", "use"]

_lock = threading.Lock()
_used: list[Client] = []


def use(client: Client | None) -> None:
    """Send all operations through ``client``; with ``None`` the next one connects to the user's own server. A client
    that was given stays the caller's to close.
    """
    with _lock:
        _used[:] = [] if client is None else [client]


def client() -> Client:
    """The client in use. Raises ``UnavailableError`` if none was given and no server answers."""
    try:
        return _used[0]
    except IndexError:
        with _lock:
            if not _used:
                _used.append(connect(name="pytorch"))
            return _used[0]

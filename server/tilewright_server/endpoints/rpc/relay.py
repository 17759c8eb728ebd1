"""Relay of connections to gRPC (``native/runtime/relay``): what one process or host sends cannot hold up the others.

gRPC takes connections and frames as they come. A relay before it counts both by the process, or over TCP the host, that
they come from, and leaves in the kernel what is beyond a rate. Bytes of calls pass as they are.

gRPC does not say who is at the other end either. A relay has asked the kernel when it accepted; it gives each of its
connections to gRPC a name of its own, which gRPC shows as the peer of their calls, and finds the other end by that.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import secrets
import socket
import threading
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tilewright_native import library_path
from tilewright_server.settings.rates import Rates

__all__ = ["Origin", "Relay", "Relayed", "process_share"]

log = logging.getLogger("tilewright.relay")

BACKLOG = 4096

NO_PROCESS = -1
"""In the place of a process's number: the other end is a host."""


def process_share(limit: int) -> int:
    """Connections that one process may have open of ``limit`` of all: half of a principal's seven eighths."""
    return (limit - limit // 8) // 2


class _Rate(ctypes.Structure):
    _fields_ = (("a_second", c_double), ("at_once", c_double))


class _Config(ctypes.Structure):
    """``tw_relay_config``."""

    _fields_ = (
        ("struct_bytes", c_uint32),
        ("listener", c_int32),
        ("target", c_char_p),
        ("name", c_char_p),
        ("connects", _Rate),
        ("control", _Rate),
        ("resets", _Rate),
        ("frames", _Rate),
        ("lists", _Rate),
        ("list_bytes", c_uint32),
        ("open_bytes", c_uint64),
    )


class _Counts(ctypes.Structure):
    """``tw_relay_counts``."""

    _fields_ = (
        ("accepted", c_uint64),
        ("refused", c_uint64),
        ("paced", c_uint64),
        ("open", c_uint64),
        ("ended", c_uint64),
    )


class _Peer(ctypes.Structure):
    """``tw_relay_peer``."""

    _fields_ = (("pid", c_int32), ("uid", c_uint32), ("host", c_uint8 * 16), ("port", c_uint32), ("tag", c_uint32))


class Origin(NamedTuple):
    """The other end of a connection: a process and its user, or an address of TCP as gRPC writes it. A process of a
    namespace that is not seen here is 0. ``tag`` is that of ``adopt``, or 0."""

    pid: int
    uid: int
    address: str = ""
    tag: int = 0


class Relayed(NamedTuple):
    """Connections that were accepted, those that were refused, waits for a process's rate, connections now, and those
    that were ended for a list of headers that is too long or malformed."""

    accepted: int
    refused: int
    paced: int
    open: int
    ended: int


@cache
def _library() -> Any:
    """Raises ``OSError`` where the library is missing or of another release."""
    library = ctypes.CDLL(str(library_path()))
    try:
        library.tw_relay_open.argtypes = (POINTER(_Config), POINTER(c_void_p))
        library.tw_relay_open.restype = c_int32
        library.tw_relay_find.argtypes = (c_void_p, c_uint64, POINTER(_Peer))
        library.tw_relay_find.restype = c_int32
        library.tw_relay_adopt.argtypes = (c_void_p, c_int32, POINTER(_Peer))
        library.tw_relay_adopt.restype = c_int32
        for name in ("run", "stop", "leave", "close"):
            function = getattr(library, f"tw_relay_{name}")
            function.argtypes, function.restype = (c_void_p,), None
        library.tw_relay_count.argtypes, library.tw_relay_count.restype = (c_void_p, POINTER(_Counts)), None
    except AttributeError as error:
        raise OSError(f"libtilewright is of another release: {error}") from error
    return library


class Relay:
    """Passes connections of ``listener`` on to the socket at ``target``, from ``start`` to ``close``."""

    def __init__(self, listener: socket.socket | None, target: Path, rates: Rates | None = None) -> None:
        """``listener``, of Unix or TCP, becomes the relay's; with None, connections come by ``adopt`` alone. ``rates``
        are those of one process, or host: the defaults if there are none.

        Raises ``OSError`` where the library is missing, or the system refuses."""
        self._library = _library()
        self._listener = listener
        self.name = f"tilewright-{secrets.token_hex(16)}"
        """Beginning of the names of its connections to the server, which nobody can guess."""
        number = -1 if listener is None else listener.fileno()
        config = _Config(ctypes.sizeof(_Config), number, bytes(target), self.name.encode())
        rates = rates or Rates()
        config.connects, config.control = _Rate(*rates.relay_connects), _Rate(*rates.relay_control)
        config.resets, config.frames = _Rate(*rates.relay_resets), _Rate(*rates.relay_frames)
        config.lists, config.list_bytes = _Rate(*rates.relay_lists), rates.relay_list_bytes
        config.open_bytes = rates.relay_open_bytes
        handle = c_void_p()
        status = self._library.tw_relay_open(byref(config), byref(handle))
        if status:
            raise OSError(f"the relay cannot be made: status {status} of libtilewright")
        self._handle: c_void_p | None = handle
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._library.tw_relay_run, args=(handle,), name="relay", daemon=True)

    def start(self) -> None:
        """Raises ``RuntimeError`` if the system refuses its thread."""
        self._thread.start()

    def counts(self) -> Relayed:
        """Counts since the start; zeros once it is closed."""
        counts = _Counts()
        with self._lock:
            if self._handle is not None:
                self._library.tw_relay_count(self._handle, byref(counts))
        return Relayed(counts.accepted, counts.refused, counts.paced, counts.open, counts.ended)

    def adopt(self, connection: socket.socket, address: str, port: int, tag: int) -> None:
        """Relay a connection, which becomes the relay's, as one from the host at ``address``. Raises ``OSError``."""
        found = ipaddress.ip_address(address.partition("%")[0])
        host = (found if found.version == 6 else ipaddress.ip_address(f"::ffff:{found}")).packed
        peer = _Peer(NO_PROCESS, 0, (c_uint8 * 16)(*host), port, tag)
        with self._lock:
            if self._handle is None or self._library.tw_relay_adopt(self._handle, connection.fileno(), byref(peer)):
                raise OSError("the relay takes no connection")
            connection.detach()

    def peer(self, number: int) -> Origin | None:
        """The other end of an open connection, by the number at the end of its name."""
        found = _Peer()
        with self._lock:
            if self._handle is None or self._library.tw_relay_find(self._handle, number, byref(found)):
                return None
        if found.pid != NO_PROCESS:
            return Origin(found.pid, found.uid)
        host = ipaddress.IPv6Address(bytes(found.host))
        address = f"ipv6:[{host}]" if host.ipv4_mapped is None else f"ipv4:{host.ipv4_mapped}"
        return Origin(NO_PROCESS, 0, f"{address}:{found.port}", found.tag)

    def leave(self) -> None:
        """Accept no more connections, and have clients make new calls over new ones; calls that have begun go on."""
        with self._lock:
            if self._handle is not None:
                self._library.tw_relay_leave(self._handle)

    def close(self) -> None:
        """End all connections. Idempotent."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return
        if self._thread.is_alive():
            self._library.tw_relay_stop(handle)
            self._thread.join()
        self._library.tw_relay_close(handle)
        if self._listener is not None:
            self._listener.close()

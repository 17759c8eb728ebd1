"""The HTTP listener of metrics and probes. It answers GET of a few fixed paths, and reads nothing else of a request."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, BufferedReader
from typing import Any, cast

from tilewright_kit.types.errors import InvalidArgumentError, UnavailableError
from tilewright_server.protocol.inherited import KEPT, SOCKET, Inherited, chosen_port

__all__ = ["HttpListener", "Page", "http_address"]

log = logging.getLogger("tilewright.http")

MOST_CONNECTIONS = 32
"""Connections at a time. Beyond that, the oldest whose request has not come gives way."""
MOST_HEADER_BYTES = 16 * 1024
"""Bytes of a request that are read."""
PATIENCE_S = 5.0
"""Time that a request may take to come and a reply to leave."""


@dataclass(frozen=True, slots=True)
class Page:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


def http_address(text: str, setting: str = "http_listen") -> tuple[str, int]:
    """Host and port of a setting; the host is 127.0.0.1 unless it is named.

    Raises ``InvalidArgumentError``.
    """
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535 or (":" in text and not host):
        raise InvalidArgumentError(
            "not an address for probes: expected PORT or HOST:PORT",
            field=setting,
            value=text,
            rule=setting,
            fix="use 9464, or 0.0.0.0:9464 where a kubelet or Prometheus comes from elsewhere",
        )
    return host.strip("[]") or "127.0.0.1", int(port)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], pages: Mapping[str, Callable[[], Page]], given: socket.socket | None
    ) -> None:
        self._given = given
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.pages = pages
        self._lock = threading.Lock()
        self._open: dict[socket.socket, bool] = {}
        """In the order of opening; true once the request has come."""
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the look-up of the host's name that the base class makes."""
        if self._given is not None:
            self.socket.close()
            self.socket = self._given
        else:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(self.server_address)
        self.socket.setblocking(False)  # a successor may take a connection that both hear of
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._admit(request):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the system refuses a thread
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def heard(self, request: socket.socket) -> bool:
        """The request of a connection has come. False if the connection has given way meanwhile."""
        with self._lock:
            if request not in self._open:
                return False
            self._open[request] = True
            return True

    def _admit(self, request: socket.socket) -> bool:
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                slow = next((item for item, has_come in self._open.items() if not has_come), None)
                if slow is None:
                    return False
                del self._open[slow]
                with contextlib.suppress(OSError):
                    slow.shutdown(socket.SHUT_RDWR)  # which ends its thread
            self._open[request] = False
            return True

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        log.debug("a request of %s was given up", client_address, exc_info=True)


class _Bounded:
    """Lines of a request, up to so many bytes of them."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = MOST_HEADER_BYTES

    def readline(self, most: int) -> bytes:
        line = self._file.readline(min(most, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise ConnectionAbortedError("the request is too long")
        return line

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "tilewright"
    sys_version = ""
    timeout = PATIENCE_S

    def setup(self) -> None:
        super().setup()
        self.rfile = cast("BufferedReader", _Bounded(self.rfile))

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        if not self.server.heard(self.connection):
            return
        make = self.server.pages.get(self.path.partition("?")[0])
        page = (
            self._made(make)
            if make is not None
            else Page(404, ("there are " + ", ".join(self.server.pages) + "\n").encode())
        )
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.end_headers()
        if body:
            self.wfile.write(page.body)

    @staticmethod
    def _made(make: Callable[[], Page]) -> Page:
        try:
            return make()
        except Exception:
            log.exception("a page could not be made")
            return Page(500, b"the server made a mistake; its log has more\n")

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s " + format, self.client_address[0], *args)


class HttpListener:
    """Listens from its making on and answers from ``start`` on."""

    def __init__(self, text: str, pages: Mapping[str, Callable[[], Page]], inherited: Inherited | None = None) -> None:
        """``text`` is the setting ``http_listen``; ``pages`` are by path. A socket of ``inherited`` that
        listens there is taken over.

        Raises ``InvalidArgumentError``, ``UnavailableError`` if the address cannot be had.
        """
        try:
            host, port = http_address(text)
            given = inherited.tcp(host, port) if inherited is not None else None
            self._server = _Server((host, port), pages, None if given is None else given.socket)
        except OSError as error:
            raise UnavailableError(
                f"cannot listen for HTTP: {error.strerror or error}",
                field="http_listen",
                value=text,
                rule="http_listen",
                fix="choose an address of this machine whose port is free",
            ) from error
        self._text, self._chosen = text, not port
        self.is_kept = given is not None and given.kept
        """The socket is a service manager's, which keeps it for the next server."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)

    @property
    def address(self) -> str:
        host, port = self._server.server_name, self._server.server_port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> None:
        self._thread.start()

    def shared(self) -> list[tuple[int, str]]:
        """Descriptors for a successor, with their names. Raises ``UnsupportedError`` if nothing in the settings says
        which one it is."""
        if self._chosen:
            raise chosen_port("http_listen", self._text)
        return [(self._server.fileno(), KEPT if self.is_kept else SOCKET)]

    def leave(self) -> None:
        """Answer nobody any more: the address is a successor's."""
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()

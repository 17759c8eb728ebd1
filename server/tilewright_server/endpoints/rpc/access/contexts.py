"""Contexts of TLS, made anew when files change. Without gRPC, which a process that terminates TLS does not load."""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Contexts", "TlsFiles", "stamps"]

PROTOCOL = "h2"
"""HTTP/2 as TLS names it, which clients of gRPC have to offer."""
MOST_HANDSHAKES = 1000
"""Handshakes of one context: OpenSSL keeps a session of each for clients that come again without a ticket."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM form."""

    certificate: Path
    key: Path
    client_ca: Path | None = None
    """Clients must have a certificate of one of these authorities; None: clients need none."""
    revoked: Path | None = None
    """Revocation list of these authorities."""


def stamps(files: TlsFiles) -> tuple[object, ...]:
    """The state of the files: another one when one of them has changed."""
    found: list[object] = []
    for path in (files.certificate, files.key, files.client_ca, files.revoked):
        try:
            status = path.stat() if path is not None else None
        except OSError:
            status = None
        found.append(status and (status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


class Contexts:
    """The context for the next connection."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ``OSError`` or ``ValueError`` (``ssl.SSLError`` is of both) if a file is missing or bad."""
        self._files = files
        self._stamp = stamps(files)
        self._context = self._made()
        self._left = MOST_HANDSHAKES

    def latest(self) -> ssl.SSLContext:
        """The context of the files as they are, or if there is a mistake in them, as they were. Raises nothing."""
        stamp = stamps(self._files)
        self._left -= 1
        if stamp != self._stamp or self._left <= 0:
            self._stamp, self._left = stamp, MOST_HANDSHAKES
            with contextlib.suppress(OSError, ValueError):  # the server reads the same files, and says so
                self._context = self._made()
        return self._context

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.num_tickets = 0  # every connection is proved anew
        context.set_alpn_protocols([PROTOCOL])
        context.load_cert_chain(self._files.certificate, self._files.key, password="")
        if self._files.client_ca is not None:
            context.load_verify_locations(cafile=self._files.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

"""The service manager that started the process (systemd): told of readiness, of life and of the end."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ServiceManager"]

log = logging.getLogger("tilewright.service_manager")


class ServiceManager:
    """Datagrams of ``sd_notify``; without an address nobody is told."""

    def __init__(self, address: str) -> None:
        """``address`` is the path of a socket, or the name of an abstract one with a leading ``@``."""
        self._address = "\0" + address[1:] if address.startswith("@") else address

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Say that the settings are read again within."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        yield
        self.tell("READY=1")

    def tell(self, *lines: str) -> None:
        """Send assignments such as ``READY=1``. Raises nothing."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
                link.settimeout(1.0)
                link.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("the service manager could not be told: %s", error)

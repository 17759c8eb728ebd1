"""Wishes of the service manager, from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ServiceManagerSettings", "inherited_sockets", "service_manager"]

FIRST = 3
"""Number of the first descriptor that a service manager passes."""


@dataclass(frozen=True, slots=True)
class ServiceManagerSettings:
    """Wishes of the service manager that started the process, as systemd says them."""

    notify_socket: str = ""
    watchdog_s: float = 0.0
    """Time without a sign of life after which it restarts the server; 0: any."""


def service_manager(environ: Mapping[str, str] | None = None) -> ServiceManagerSettings:
    """From ``NOTIFY_SOCKET`` and ``WATCHDOG_USEC``."""
    environ = os.environ if environ is None else environ
    limit, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    ours = not pid or pid == str(os.getpid())
    watchdog_s = int(limit) / 1e6 if ours and limit.isdigit() else 0.0
    return ServiceManagerSettings(environ.get("NOTIFY_SOCKET", ""), watchdog_s)


def inherited_sockets(environ: Mapping[str, str] | None = None) -> list[tuple[int, str]]:
    """Descriptors that the process was started with, and their names (``LISTEN_PID``, ``LISTEN_FDS``,
    ``LISTEN_FDNAMES``)."""
    environ = os.environ if environ is None else environ
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdigit():
        return []
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    return [(FIRST + place, names[place] if place < len(names) else "") for place in range(int(count))]

"""Settings that a running server takes over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.settings import Settings

__all__ = ["RELOADED", "differences", "read_again"]

log = logging.getLogger("tilewright")

RELOADED = frozenset(
    {"log_level", "log_format", "slow_call_s", "grace_s", "call_rate", "max_sessions", "local_connections"}
    | {"max_streams", "region_bytes", "all_buffers", "all_buffer_bytes", "all_plans", "request_bytes", "unread_bytes"}
    | {"all_regions", "host_buffer_bytes", "all_plan_bytes", "kserve_region_bytes"}
)
"""Settings that SIGHUP changes; all others wait for the next start."""


def differences(old: Settings, new: Settings) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Values that change in a running server, by name, and names of those that wait."""
    names = [item.name for item in fields(Settings) if getattr(new, item.name) != getattr(old, item.name)]
    changes = {name: getattr(new, name) for name in names if name in RELOADED}
    return changes, [name for name in names if name not in RELOADED]


def read_again(given: Settings, reread: Callable[[], Settings] | None) -> Mapping[str, Any] | None:
    """Values that change by what ``reread`` returns. None, with a word in the log, if nothing can be read."""
    if reread is None:
        log.warning("settings are not read again: they were given to this server by a program")
        return None
    try:
        found = reread()
    except TilewrightError as error:
        log.error("the settings stay as they are: %s", error)
        return None
    changes, later = differences(given, found)
    log.warning("settings were read again; changed: %s", ", ".join(changes) or "nothing")
    if later:
        log.warning("not changed before the server is started again: %s", ", ".join(later))
    return changes

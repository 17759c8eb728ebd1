"""Settings that a running server takes over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from tilewright_server.settings import Settings

__all__ = ["RELOADED", "differences"]

RELOADED = frozenset(
    {"log_level", "log_format", "slow_call_s", "grace_s", "call_rate", "max_sessions", "local_connections"}
    | {"max_streams", "region_bytes", "all_buffers", "all_buffer_bytes", "all_plans", "request_bytes", "unread_bytes"}
    | {"all_regions", "host_buffer_bytes", "all_plan_bytes"}
)
"""Settings that SIGHUP changes; all others wait for the next start."""


def differences(old: Settings, new: Settings) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Values that change in a running server, by name, and names of those that wait."""
    names = [item.name for item in fields(Settings) if getattr(new, item.name) != getattr(old, item.name)]
    changes = {name: getattr(new, name) for name in names if name in RELOADED}
    return changes, [name for name in names if name not in RELOADED]

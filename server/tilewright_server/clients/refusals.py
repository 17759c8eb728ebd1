"""Refusals of what one session would hold beyond its own limits.

A quota that clients share has the rule ``quota`` and a time to try again: others may make room. Here only the session
itself can, so nothing is said of a time, and who is refused hears it at once.
"""

from __future__ import annotations

from tilewright_kit.types.errors import ResourceExhaustedError

__all__ = ["SESSION_QUOTA", "over_session_quota"]

SESSION_QUOTA = "session_quota"
"""Rule of these refusals."""


def over_session_quota(quota: str, limit: int, reason: str, fix: str) -> ResourceExhaustedError:
    """Refuse what is beyond ``limit``; ``reason`` says how much the session holds, and ``fix`` how it makes room."""
    return ResourceExhaustedError(reason, field=quota, value=limit, rule=SESSION_QUOTA, fix=fix)

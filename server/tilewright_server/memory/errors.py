"""Errors of sessions, in the same words for all kinds of objects."""

from __future__ import annotations

from tilewright_kit.types.errors import AccessError, DeadlineError, InvalidArgumentError, NotFoundError

__all__ = ["empty_buffer", "not_over_tcp", "still_used", "unknown", "unknown_session"]


def unknown(kind: str, item_id: int) -> NotFoundError:
    """For ids that never were, that have ended, and that are another session's: nobody can tell which."""
    return NotFoundError(
        f"the session has no such {kind}",
        field=kind,
        value=item_id,
        rule=f"{kind}_id",
        fix=f"use the id of a {kind} of this session that has not been given back",
    )


def unknown_session() -> NotFoundError:
    return NotFoundError(
        "there is no such session",
        field="session",
        rule="session_token",
        fix="open a session and keep its stream open for as long as it is used",
    )


def not_over_tcp() -> AccessError:
    return AccessError(
        "shared memory cannot be registered over TCP: the caller cannot be told from any other process",
        field="source",
        rule="region_transport",
        fix="connect over the server's Unix socket, or send operands inline or in resident buffers",
    )


def empty_buffer(nbytes: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        "a buffer has at least one byte", field="bytes", value=nbytes, rule="buffer_size", fix="ask for one or more"
    )


def still_used(kind: str, item_id: int) -> DeadlineError:
    return DeadlineError(
        f"work in flight still uses the {kind}; it goes when that work is done",
        field=kind,
        value=item_id,
        rule="deadline",
        fix="nothing has to be done again; allow more time to see the end of it",
    )

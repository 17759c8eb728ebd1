"""Errors as messages, for every transport: gRPC, the local socket and the workers of devices."""

from __future__ import annotations

import json
import logging
import secrets

from tilewright_kit.config.rules import Violation
from tilewright_kit.types import errors as kit
from tilewright_proto.v1 import error_pb2
from tilewright_server.protocol.request_ids import current

__all__ = ["MAX_DETAIL", "MAX_MESSAGE", "as_tilewright_error", "clean", "to_detail", "to_violation"]

log = logging.getLogger("tilewright.rpc")

# Trailing metadata of more than 8 KiB is refused by many peers, and some count it base64-encoded.
MAX_MESSAGE = 1000
MAX_DETAIL = 4000
MAX_LOG_TAIL = 2000


def to_violation(violation: Violation) -> error_pb2.Violation:
    return error_pb2.Violation(
        rule=violation.rule,
        field=violation.field,
        value=clean(violation.value, 200),
        reason=clean(violation.reason, 500),
        fix={str(name): json.dumps(value, default=str) for name, value in dict(violation.fix or {}).items()},
    )


def to_detail(error: kit.TilewrightError, limit: int = MAX_DETAIL) -> error_pb2.ErrorDetail:
    """The error as a message of at most about ``limit`` bytes: the log's tail is cut first, then violations go from
    the end.
    """
    detail = error_pb2.ErrorDetail(
        code=error.code,
        message=clean(error.reason, MAX_MESSAGE),
        field=clean(error.field, 200),
        value=clean(error.value, 200),
        rule=clean(error.rule, 200),
        fix=clean(error.fix, MAX_MESSAGE),
        log_tail=clean(error.log_tail[-MAX_LOG_TAIL:], MAX_LOG_TAIL),
        request=current(),
    )
    if error.retry_after_s is not None:
        detail.retry_after_ms = max(1, int(error.retry_after_s * 1000))
    for violation in error.violations:
        detail.violations.append(to_violation(violation))
        if detail.ByteSize() > limit:
            del detail.violations[-1]
            break
    return detail


def clean(value: object, limit: int) -> str:
    """Text of at most ``limit`` characters that is safe in a message: no lone surrogates."""
    text = value if isinstance(value, str) else str(value)
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def as_tilewright_error(error: BaseException) -> kit.TilewrightError:
    """``error`` itself if callers may see it; else an ``InternalError`` with an id under which the log has more."""
    if isinstance(error, kit.TilewrightError):
        return error
    if isinstance(error, MemoryError):
        return kit.ResourceExhaustedError(
            "the server has not enough memory for this",
            rule="memory",
            fix="send less at a time, or use a machine with more memory",
            retry_after_s=1.0,
        )
    number = secrets.token_hex(8)
    log.error("internal error %s", number, exc_info=error)
    return kit.InternalError(
        "the server made a mistake",
        field="id",
        value=number,
        rule="internal",
        fix="report it with the log's entry of this id",
    )

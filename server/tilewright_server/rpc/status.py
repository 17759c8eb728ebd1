"""Errors on the wire: one table from error types to status codes, and the details that travel beside the status."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any, NoReturn

import grpc

from tilewright_kit.types import errors as kit
from tilewright_server.protocol.errors import MAX_MESSAGE, clean, to_detail, to_violation

__all__ = [
    "ERROR_METADATA",
    "STATUS",
    "abort",
    "as_tilewright_error",
    "clean",
    "set_status",
    "status_of",
    "to_detail",
    "to_violation",
]

log = logging.getLogger("tilewright.rpc")

ERROR_METADATA = "tilewright-error-bin"
PUSHBACK_METADATA = "grpc-retry-pushback-ms"

Code = grpc.StatusCode
STATUS: Mapping[type[kit.TilewrightError], grpc.StatusCode] = {
    kit.InvalidArgumentError: Code.INVALID_ARGUMENT,
    kit.ConfigInvalidError: Code.INVALID_ARGUMENT,
    kit.UnsupportedError: Code.UNIMPLEMENTED,
    kit.NotFoundError: Code.NOT_FOUND,
    kit.AccessError: Code.PERMISSION_DENIED,
    kit.ResourceExhaustedError: Code.RESOURCE_EXHAUSTED,
    kit.DeadlineError: Code.DEADLINE_EXCEEDED,
    kit.CancelledError: Code.CANCELLED,
    kit.ToolchainMissingError: Code.FAILED_PRECONDITION,
    kit.BuildFailedError: Code.FAILED_PRECONDITION,
    kit.DeviceError: Code.INTERNAL,
    kit.UnavailableError: Code.UNAVAILABLE,
    kit.InternalError: Code.INTERNAL,
}
"""The one place that says which status an error becomes."""


def status_of(error: kit.TilewrightError) -> grpc.StatusCode:
    """Status of an error, by its nearest type in the table."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), Code.INTERNAL)


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


def set_status(context: grpc.ServicerContext, error: BaseException) -> tuple[grpc.StatusCode, str]:
    """Give a call the status and details of ``error``, without ending it. Returns the code and the message."""
    known = as_tilewright_error(error)
    detail = to_detail(known)
    trailing: list[tuple[str, Any]] = [(ERROR_METADATA, detail.SerializeToString())]
    if detail.retry_after_ms:
        trailing.append((PUSHBACK_METADATA, str(detail.retry_after_ms)))
    code, message = status_of(known), clean(str(known), MAX_MESSAGE)
    context.set_trailing_metadata(tuple(trailing))
    context.set_code(code)
    context.set_details(message)
    return code, message


def abort(context: grpc.ServicerContext, error: BaseException) -> NoReturn:
    """End the call with the status and details of ``error``."""
    context.abort(*set_status(context, error))
    raise AssertionError("abort raises")

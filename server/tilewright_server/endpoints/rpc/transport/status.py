"""gRPC status of errors: one table from error types to codes, and the details in trailing metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from tilewright_kit.types import errors as kit
from tilewright_server.endpoints.messages.status_details import STATUS_METADATA, status_details
from tilewright_server.protocol.errors import as_tilewright_error, clean, to_detail

__all__ = ["ERROR_METADATA", "STATUS", "set_status", "status_of"]

ERROR_METADATA = "tilewright-error-bin"
PUSHBACK_METADATA = "grpc-retry-pushback-ms"
MOST_TEXT = 600
"""Characters of the message, which stands in the status and in its details."""
MOST_DETAIL = 3000
"""Bytes of our own detail without its log."""

Code = grpc.StatusCode
STATUS: Mapping[type[kit.TilewrightError], grpc.StatusCode] = {
    kit.InvalidArgumentError: Code.INVALID_ARGUMENT,
    kit.ConfigInvalidError: Code.INVALID_ARGUMENT,
    kit.UnsupportedError: Code.UNIMPLEMENTED,
    kit.NotFoundError: Code.NOT_FOUND,
    kit.UnauthenticatedError: Code.UNAUTHENTICATED,
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


def set_status(context: grpc.ServicerContext, error: BaseException, request: str = "") -> kit.TilewrightError:
    """Give a call, whose id is ``request``, the status and details of ``error``, without ending it. Returns the error
    that the caller sees."""
    known = as_tilewright_error(error)
    detail = to_detail(known, MOST_DETAIL)
    detail.request = request
    text = clean(str(known), MOST_TEXT)
    code = status_of(known)
    trailing: list[tuple[str, Any]] = [
        (ERROR_METADATA, detail.SerializeToString()),
        (STATUS_METADATA, status_details(known, code, text, request)),
    ]
    if detail.retry_after_ms:
        trailing.append((PUSHBACK_METADATA, str(detail.retry_after_ms)))
    context.set_trailing_metadata(tuple(trailing))
    context.set_code(code)
    context.set_details(text)
    return known

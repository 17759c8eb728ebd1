"""Errors as ``google.rpc.Status``: for clients that know Google's details and not ours."""

from __future__ import annotations

from typing import Any

import grpc

from tilewright_kit.types import errors as kit
from tilewright_server.protocol.errors import clean

__all__ = ["STATUS_METADATA", "status_details"]

STATUS_METADATA = "grpc-status-details-bin"
"""Metadata in which gRPC's libraries look for it."""
DOMAIN = "tilewright"
MOST_TEXT = 200
MOST_VIOLATIONS = 3
"""Few and short: all metadata of a reply together has 8 KiB at many peers, and our own detail has them all."""


def status_details(error: kit.TilewrightError, code: grpc.StatusCode, text: str, request_id: str = "") -> bytes:
    """The serialised status with the message ``text``, which must be the call's own.

    It has ``ErrorInfo`` with rule and fix; ``BadRequest`` for a field that is wrong, ``QuotaFailure`` for what is used
    up, ``RetryInfo`` if trying again helps, and ``RequestInfo`` with ``request_id``.
    """
    # Imported with the first error: a server that starts need not wait for them.
    from google.protobuf.any_pb2 import Any as Packed
    from google.rpc import error_details_pb2, status_pb2

    def short(text: object) -> str:
        return clean(text, MOST_TEXT)

    found: list[Any] = [
        error_details_pb2.ErrorInfo(
            reason=(error.rule or error.code).upper(), domain=DOMAIN, metadata={"fix": short(error.fix)}
        )
    ]
    if isinstance(error, kit.ResourceExhaustedError):
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(subject=short(error.field), description=short(error.reason))
        found.append(failure)
    elif code is grpc.StatusCode.INVALID_ARGUMENT:
        request = error_details_pb2.BadRequest()
        named = [(item.field, item.reason) for item in error.violations[:MOST_VIOLATIONS]]
        for field, reason in named or [(str(error.field), error.reason)]:
            request.field_violations.add(field=short(field), description=short(reason))
        found.append(request)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(max(1, int(error.retry_after_s * 1000)))
        found.append(retry)
    if request_id:
        found.append(error_details_pb2.RequestInfo(request_id=request_id))
    status = status_pb2.Status(code=code.value[0], message=text)
    for detail in found:
        packed = Packed()
        packed.Pack(detail)
        status.details.append(packed)
    return bytes(status.SerializeToString())

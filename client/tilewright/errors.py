"""Typed errors. Each carries the server's stable code and what is needed to mend the request.

``message`` is for people; ``field``, ``value``, ``rule`` and ``fix`` are the same facts for programs. A mistake that
the client sees by itself raises the same types before anything is sent.

    >>> import numpy as np
    >>> from tilewright.types.dtypes import element_type
    >>> try:
    ...     element_type(np.float64)
    ... except InvalidArgumentError as error:
    ...     print(error.code, error.field, error.rule)
    invalid_argument dtype dtype_known
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError

from tilewright_proto.v1 import error_pb2

__all__ = [
    "AccessError",
    "BuildFailedError",
    "CancelledError",
    "ConfigInvalidError",
    "DeadlineError",
    "DeviceError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "ResourceExhaustedError",
    "TilewrightError",
    "ToolchainMissingError",
    "UnavailableError",
    "UnknownOutcomeError",
    "UnsupportedError",
    "Violation",
]

DETAIL_KEY = "tilewright-error-bin"
"""Trailing metadata that carries a serialised ``ErrorDetail``."""
PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""gRPC's own trailing metadata that says when to try again, from servers and from what stands before them."""


@dataclass(frozen=True)
class Violation:
    """One broken rule of a kernel configuration. ``fix`` maps a field to the JSON text of a value that mends it."""

    rule: str
    field: str
    value: str
    reason: str
    fix: Mapping[str, str] = dataclasses.field(default_factory=dict)


class TilewrightError(Exception):
    """Base of every error of this library."""

    code: ClassVar[str] = "internal"
    repeatable = False
    """True if the session, or a connection of it, ended before the call had begun: it may be made again."""
    request = ""
    """Id of the call, by which the server's log has it; empty for a mistake that was seen before anything was sent."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: object = "",
        rule: str = "",
        fix: str = "",
        violations: Iterable[Violation] = (),
        log_tail: str = "",
        retry_after: float | None = None,
    ) -> None:
        text = value if isinstance(value, str) else repr(value)
        self.message = message
        self.field = field
        self.value = text if len(text) <= 200 else text[:197] + "..."
        self.rule = rule
        self.fix = fix
        self.violations = tuple(violations)
        self.log_tail = log_tail
        self.retry_after = retry_after
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.message]
        if self.field and self.field not in self.message:
            parts.append(f"[{self.field}={self.value}]" if self.value else f"[{self.field}]")
        if self.fix and self.fix not in self.message:
            parts.append(f"Fix: {self.fix}")
        return " ".join(parts)


class InvalidArgumentError(TilewrightError):
    """The request cannot be meant: wrong shape, dtype, stride, size or attribute."""

    code = "invalid_argument"


class ConfigInvalidError(TilewrightError):
    """A kernel configuration breaks rules of its operation or arch; ``violations`` has all of them."""

    code = "config_invalid"


class UnsupportedError(TilewrightError):
    """The request is meaningful, but no kernel, device or build of this server can do it."""

    code = "unsupported"


class NotFoundError(TilewrightError):
    """Nothing of that id or name is visible to this session."""

    code = "not_found"


class AccessError(TilewrightError):
    """The caller may not do that over this connection."""

    code = "permission_denied"


class ResourceExhaustedError(TilewrightError):
    """A queue, quota or memory is full; ``retry_after`` (seconds) says when to try again, where that helps."""

    code = "resource_exhausted"


class DeadlineError(TilewrightError):
    """The deadline passed. If the server saw it first, nothing was launched."""

    code = "deadline_exceeded"


class CancelledError(TilewrightError):
    """The call was cancelled."""

    code = "cancelled"


class ToolchainMissingError(TilewrightError):
    """The server has no compiler for this device; ``fix`` says how to get one."""

    code = "toolchain_missing"


class BuildFailedError(TilewrightError):
    """A kernel could not be compiled; ``log_tail`` has the end of the compiler's output."""

    code = "build_failed"


class DeviceError(TilewrightError):
    """The device or its driver reported a fault."""

    code = "device_error"


class UnavailableError(TilewrightError):
    """No server is there: it never was, it went away, it is draining, or this session of it ended."""

    code = "unavailable"


class UnknownOutcomeError(UnavailableError):
    """The connection broke during the call: it may have been carried out, in part or not at all. It is not made again
    by itself.
    """


class InternalError(TilewrightError):
    """A fault of the server; its log has the detail."""

    code = "internal"


UNFINISHED = (CancelledError, DeadlineError, InternalError, UnavailableError)
"""Errors after which the server may still be working: nobody said that it is done."""


def unbegun(error: UnavailableError) -> UnavailableError:
    """The error as one of a call that had not begun."""
    error.repeatable = True
    return error


def outcome_unknown(reason: str) -> UnknownOutcomeError:
    return UnknownOutcomeError(
        f"the call had begun, and its outcome is not known: {reason}",
        field="session",
        rule="outcome_unknown",
        fix="make the call again if it may run twice; its outputs may hold a part of the result",
    )


def is_unbound(error: TilewrightError) -> bool:
    """True if a launch did not begin, its binding being unknown: that went with its memory or its device's process."""
    return isinstance(error, NotFoundError) and error.rule == "binding_id"


def is_unfinished(error: TilewrightError) -> bool:
    """True if the server may still be working on the call."""
    return isinstance(error, UNFINISHED) and not error.repeatable


_BY_CODE: dict[str, type[TilewrightError]] = {
    kind.code: kind
    for kind in (
        InvalidArgumentError,
        ConfigInvalidError,
        UnsupportedError,
        NotFoundError,
        AccessError,
        ResourceExhaustedError,
        DeadlineError,
        CancelledError,
        ToolchainMissingError,
        BuildFailedError,
        DeviceError,
        UnavailableError,
        InternalError,
    )
}

_BY_STATUS: dict[grpc.StatusCode, type[TilewrightError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidArgumentError,
    grpc.StatusCode.ALREADY_EXISTS: InvalidArgumentError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
    grpc.StatusCode.UNAUTHENTICATED: AccessError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.ABORTED: UnavailableError,
}


_LATE = "allow more time; a first call of a new kind includes a compilation"


def violation(message: error_pb2.Violation) -> Violation:
    return Violation(message.rule, message.field, message.value, message.reason, dict(message.fix))


def of_code(code: str) -> type[TilewrightError]:
    """The class of a code; ``InternalError`` for one that is not known."""
    return _BY_CODE.get(code, InternalError)


def from_detail(detail: error_pb2.ErrorDetail, otherwise: type[TilewrightError] = InternalError) -> TilewrightError:
    """The exception that a detail describes; an unknown code becomes ``otherwise``."""
    kind = _BY_CODE.get(detail.code, otherwise)
    late = kind is DeadlineError
    found = kind(
        detail.message or detail.code or "the server gave no reason",
        field=detail.field or ("timeout" if late else ""),
        value=detail.value,
        rule=detail.rule,
        fix=detail.fix or (_LATE if late else ""),
        violations=[violation(item) for item in detail.violations],
        log_tail=detail.log_tail,
        retry_after=detail.retry_after_ms / 1000 if detail.retry_after_ms else None,
    )
    found.request = detail.request
    return found


def from_status(status: grpc.StatusCode | None, text: str | None, metadata: Iterable[Any] | None) -> TilewrightError:
    """The exception for a failed call: from its detail, if it brought one that can be read, or the bare status."""
    kind = _BY_STATUS.get(status, InternalError) if status is not None else InternalError
    given = dict(metadata or ())
    found = None
    if isinstance(detail := given.get(DETAIL_KEY), bytes):
        with contextlib.suppress(DecodeError):
            found = from_detail(error_pb2.ErrorDetail.FromString(detail), kind)
    if found is None and kind is DeadlineError:
        found = kind("the deadline passed before the server answered", field="timeout", rule="deadline", fix=_LATE)
    if found is None:
        name = status.name if status is not None else "no status"
        found = kind(f"{text} ({name})" if text else f"the call failed with {name}", rule="grpc_status", value=name)
    pushback = given.get(PUSHBACK_KEY)
    if pushback is not None:
        # Any other text, and a negative number, mean that trying again is not wanted.
        found.retry_after = int(pushback) / 1000 if isinstance(pushback, str) and pushback.isdecimal() else None
    return found


def from_rpc(error: Any) -> TilewrightError:
    """The exception for a ``grpc.RpcError``, of the blocking or the asyncio API."""
    return from_status(error.code(), error.details(), error.trailing_metadata())

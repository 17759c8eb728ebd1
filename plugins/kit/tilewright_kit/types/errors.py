"""The one family of errors. Each carries a stable code and what the caller needs to correct the request.

A message is for people; ``field``, ``value``, ``rule`` and ``fix`` are the same facts for programs. Nothing in an error
may name another session's objects, a path or an address of the server: that detail belongs in the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tilewright_kit.types.violation import Violation

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
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedError",
]


class TilewrightError(Exception):
    """Base of every error that a caller may see."""

    code: ClassVar[str] = "internal"

    def __init__(
        self,
        reason: str,
        *,
        field: str = "",
        value: object = "",
        rule: str = "",
        fix: str = "",
        violations: Sequence[Violation] = (),
        log_tail: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        self.reason = reason
        self.field = field
        self.value = _short(value)
        self.rule = rule
        self.fix = fix
        self.violations = tuple(violations)
        self.log_tail = log_tail
        self.retry_after_s = retry_after_s
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [self.reason]
        if self.field:
            parts.append(f"[{self.field}={self.value}]" if self.value else f"[{self.field}]")
        if self.fix:
            parts.append(f"Fix: {self.fix}")
        return " ".join(parts)


def _short(value: object, limit: int = 200) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


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
    """Nothing of that id or name is visible to this session. Says the same for an object of another session."""

    code = "not_found"


class AccessError(TilewrightError):
    """The caller may not do that over this connection."""

    code = "permission_denied"


class UnauthenticatedError(AccessError):
    """The caller has proved nothing that this server knows: no certificate, or no token."""


class ResourceExhaustedError(TilewrightError):
    """A queue, quota or memory is full; ``retry_after_s`` says when to try again, where that helps."""

    code = "resource_exhausted"


class DeadlineError(TilewrightError):
    """The caller's deadline passed before the work was launched, or between repeats of it, which the message counts."""

    code = "deadline_exceeded"


class CancelledError(TilewrightError):
    """The caller went away or cancelled before the work was launched, or between repeats of it."""

    code = "cancelled"


class ToolchainMissingError(TilewrightError):
    """No compiler for this device was found; ``fix`` says how to get one."""

    code = "toolchain_missing"


class BuildFailedError(TilewrightError):
    """A compiler failed, hung or was killed; ``log_tail`` has the end of its output."""

    code = "build_failed"


class DeviceError(TilewrightError):
    """The device or its driver reported a fault."""

    code = "device_error"


class UnavailableError(TilewrightError):
    """The server is starting, draining or lost its device."""

    code = "unavailable"


class InternalError(TilewrightError):
    """A fault of ours; the log has the detail under the id in ``value``."""

    code = "internal"

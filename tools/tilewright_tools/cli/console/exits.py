"""Exit codes, and which error ends with which."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["EXIT_CODES_HELP", "Exit", "exit_for"]


class Exit(IntEnum):
    """Exit codes that scripts may rely on."""

    OK = 0
    FAILED = 1
    """The work was done and its answer is no: a check failed, a configuration is invalid, a kernel did not build."""
    USAGE = 2
    """The request cannot be meant: an unknown option, kernel or arch, a wrong value. Also: packages are missing."""
    UNAVAILABLE = 3
    """No server answers, or it is draining, full or too slow."""
    MISSING = 4
    """The machine lacks something: a compiler, a device."""
    INTERRUPTED = 130


EXIT_CODES_HELP = (
    "Exit codes: 0 done; 1 the answer is no (a check failed, a kernel did not build); 2 the request is wrong; "
    "3 no server, or it is busy; 4 this machine lacks something (see `tilewright doctor`); 130 interrupted."
)

_BY_CODE = {
    "invalid_argument": Exit.USAGE,
    "not_found": Exit.USAGE,
    "permission_denied": Exit.USAGE,
    "unavailable": Exit.UNAVAILABLE,
    "resource_exhausted": Exit.UNAVAILABLE,
    "deadline_exceeded": Exit.UNAVAILABLE,
    "cancelled": Exit.UNAVAILABLE,
    "toolchain_missing": Exit.MISSING,
}


_MISSING = ("device_id",)
"""Rules of what a request names and the machine has not."""


def exit_for(code: str, rule: str = "") -> Exit:
    """The exit code for an error's stable code and rule."""
    return Exit.MISSING if rule in _MISSING else _BY_CODE.get(code, Exit.FAILED)

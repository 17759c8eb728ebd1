"""Failures of builds that say nothing about the source, and the ends of builds that nobody wants any more."""

from __future__ import annotations

import errno
import signal

from tilewright_kit.types.errors import (
    BuildFailedError,
    CancelledError,
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
)

__all__ = ["from_outside", "shutting_down", "unwanted"]

_RETRY_AFTER_S = 5.0
"""Advice to a caller whose build failed from outside each time."""
_SIGNALS_FROM_OUTSIDE = tuple(
    f"signal {number.value}" for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
)
_WORDS_FROM_OUTSIDE = ("Killed signal terminated program", "Terminated signal terminated program", "out of memory")
"""Reports of GCC's and Clang's drivers that a child was killed, and of compilers that got no memory."""


def from_outside(name: str, error: BuildFailedError | ResourceExhaustedError | OSError) -> TilewrightError | None:
    """The error of a failure that says nothing about the source; None if it was the compiler's word on it."""
    if isinstance(error, ResourceExhaustedError):
        return error
    if isinstance(error, OSError):
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE):
            return None
        return ResourceExhaustedError(
            f"the server ran out of something while it built {name}: {error.strerror}",
            value=errno.errorcode[error.errno],
            rule="build_resources",
            fix="free disk space, memory, processes or descriptors on the server's machine, and try again",
            retry_after_s=_RETRY_AFTER_S,
        )
    killed = error.rule == "compiler_killed" and error.value in _SIGNALS_FROM_OUTSIDE
    starved = error.rule == "compiler_failed" and any(words in error.log_tail for words in _WORDS_FROM_OUTSIDE)
    if not (killed or starved or error.rule == "compiler_hung"):
        return None
    return UnavailableError(
        error.reason if not starved else f"the compiler was killed or got no memory while it built {name}",
        value=error.value,
        rule="compiler_hung" if error.rule == "compiler_hung" else "compiler_killed",
        fix="try again; if it stays so, give the machine more memory, build with fewer workers, or allow more time",
        log_tail=error.log_tail,
        retry_after_s=_RETRY_AFTER_S,
    )


def shutting_down() -> UnavailableError:
    """The error of builds that the end of the server ends."""
    return UnavailableError("the server is shutting down", rule="shutdown", fix="use another server")


def unwanted(name: str) -> CancelledError:
    """The error of a build that nobody waits for any more."""
    return CancelledError(
        f"the build of {name} was cancelled before it began: whoever wanted it has gone",
        field="build",
        rule="build_unwanted",
        fix="ask for it again if it is still wanted",
    )

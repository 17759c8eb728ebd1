"""Address space that is left to the server itself: where there is a limit, large requests stop short of it.

Under ``ulimit -v`` the libraries below us end the process when a small allocation fails, so clients are never given the
last of it.
"""

from __future__ import annotations

import resource
from pathlib import Path

from tilewright_kit.types.errors import ResourceExhaustedError

__all__ = ["check_address_space"]

KEPT = 4
"""A fourth of the limit stays the server's: for threads, replies and what gRPC holds."""


def check_address_space(nbytes: int) -> None:
    """``ResourceExhaustedError`` if ``nbytes`` more would leave less than the server's own part of the limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if used + nbytes > limit - limit // KEPT:
        raise ResourceExhaustedError(
            "the server's limit of address space leaves no room for this",
            field="bytes",
            value=nbytes,
            rule="address_space",
            fix="free buffers or unregister regions, or raise the server's limit (ulimit -v)",
            retry_after_s=1.0,
        )

"""Requests that were resolved before, by their bytes."""

from __future__ import annotations

from typing import Any

__all__ = ["MEMO_BYTES", "Memo"]

MEMO_BYTES = 8 << 20
"""Memory for the remembered requests of one session."""


class Memo(dict[bytes, Any]):
    """Resolved requests. Reads need no lock; ``put`` and ``empty`` are called under the session's."""

    nbytes = 0

    def put(self, request: bytes, resolved: Any, nbytes: int) -> None:
        """Note what a request resolved to, which takes about ``nbytes`` besides the request."""
        if request in self:  # two streams sent it at the same time
            return
        nbytes += len(request)
        if nbytes > MEMO_BYTES // 4:
            return
        self.nbytes += nbytes
        if self.nbytes > MEMO_BYTES:
            self.clear()
            self.nbytes = nbytes
        self[request] = resolved

    def empty(self) -> None:
        self.clear()
        self.nbytes = 0

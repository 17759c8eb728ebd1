"""Objects that a session owns and work in flight uses: an object that is released only when nobody uses it any more."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["Pinned"]


class Pinned:
    """``size`` bytes at ``address`` (0: not addressable by the server).

    Counts and flags are guarded by the lock of the session that owns it.
    """

    __slots__ = ("address", "closing", "id", "owner", "pins", "size")

    kind: ClassVar[str] = "object"

    def __init__(self, size: int) -> None:
        self.id = 0
        self.size = size
        self.address = 0
        self.pins = 0
        """Requests in flight that use it."""
        self.owner: object = None
        """Owner with which it ends, besides its session: the local connection that it was made over."""
        self.closing = False
        """Set once its end has been asked for: it takes no further pins."""

    def release(self) -> None:
        raise NotImplementedError

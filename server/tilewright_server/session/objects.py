"""The objects of a session as those see them who bind operands to them, without the session's life."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection
from typing import Protocol

from tilewright_server.memory.buffers import ResidentBuffer
from tilewright_server.memory.device_regions import DeviceRegion
from tilewright_server.memory.pinned import Pinned
from tilewright_server.memory.regions import Region

__all__ = ["AnyRegion", "OwnedObjects", "new_id"]

AnyRegion = Region | DeviceRegion
_counter = itertools.count(1)


def new_id() -> int:
    """An id that is never zero, cannot be guessed from another and does not come again (until 2**28 more have been
    given out). It has 53 bits: languages whose numbers are doubles hold it.
    """
    return secrets.randbits(25) << 28 | (next(_counter) & 0xFFFFFFF) or new_id()


class OwnedObjects(Protocol):
    """Regions and buffers by id, new buffers, and pins. ``Session`` implements it."""

    def region(self, region_id: int) -> AnyRegion:
        """Raises ``NotFoundError``."""
        ...

    def buffer(self, buffer_id: int) -> ResidentBuffer:
        """Raises ``NotFoundError``."""
        ...

    def create_buffer(
        self,
        nbytes: int,
        allocate: Callable[[int], ResidentBuffer],
        takes: Callable[[int], int] = int,
        *,
        on_host: bool,
    ) -> ResidentBuffer:
        """Raises ``ResourceExhaustedError`` at the quota."""
        ...

    def free_buffer(self, buffer_id: int) -> None:
        """Raises ``NotFoundError``."""
        ...

    def pin(self, objects: Collection[Pinned]) -> None:
        """Keep ``objects`` alive until ``unpin``. Raises ``NotFoundError`` if one has ended; then none is pinned."""
        ...

    def unpin(self, objects: Collection[Pinned]) -> None: ...

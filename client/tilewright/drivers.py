"""The drivers of this process by the kind of their devices. None is loaded before the first use."""

from __future__ import annotations

from tilewright import cuda, hip
from tilewright.errors import TilewrightError
from tilewright.gpu import GpuDriver

__all__ = ["KINDS", "driver_of", "kind_of_address"]

KINDS = ("cuda", "hip")
"""Of the server's devices that this process can share memory with."""


def driver_of(kind: str) -> GpuDriver:
    """Raises ``UnavailableError`` where there is none."""
    return hip.driver() if kind == "hip" else cuda.driver()


def kind_of_address(address: int) -> str:
    """Whose memory an address is, where nobody says: the first kind whose driver is there and knows it; ``cuda`` if
    none does."""
    return next((kind for kind in KINDS if _knows(kind, address)), KINDS[0])


def _knows(kind: str, address: int) -> bool:
    try:
        return bool(driver_of(kind).identity(address))
    except TilewrightError:  # there is none
        return False

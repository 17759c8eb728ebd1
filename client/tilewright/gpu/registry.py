"""The drivers of this process by the kind of their devices. None is loaded before the first use."""

from __future__ import annotations

from tilewright.errors import TilewrightError
from tilewright.gpu import cuda, hip
from tilewright.gpu.driver import GpuDriver

__all__ = ["KINDS", "driver_of", "kind_of_address"]

KINDS = ("cuda", "hip")
"""Kinds of the server's devices with which this process can share memory."""


def driver_of(kind: str) -> GpuDriver:
    """Raises ``UnavailableError`` where there is none."""
    return hip.driver() if kind == "hip" else cuda.driver()


def kind_of_address(address: int) -> str:
    """Kind of the memory at an address, where none is named: the one whose driver knows it. Of addresses that none
    knows, the
    first kind that has a driver here; that driver will say what is wrong with them."""
    here = [kind for kind in KINDS if _is_here(kind)]
    return next((kind for kind in here if driver_of(kind).identity(address)), (here or KINDS)[0])


def _is_here(kind: str) -> bool:
    try:
        driver_of(kind)
    except TilewrightError:
        return False
    return True

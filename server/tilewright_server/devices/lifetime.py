"""Devices that can be lost and opened again: what belongs to which opening.

Addresses of one opening mean nothing in the next, or worse, somebody else's memory. So they remember where they are
from, also when an offset is added, and a device can refuse those that are stale.
"""

from __future__ import annotations

from typing import Any

from tilewright_kit.contract.device import Buffer

__all__ = ["DeviceAddress", "Lifetime", "is_lost"]


class Lifetime:
    """One opening of a device. ``lost`` becomes true once, for good."""

    lost = False


class DeviceAddress(int):
    """An address with the opening of the device that it belongs to; sums with offsets belong to it too."""

    life: Lifetime

    def __new__(cls, value: int, life: Lifetime) -> DeviceAddress:
        address = int.__new__(cls, value)
        address.life = life
        return address

    def __add__(self, offset: int) -> DeviceAddress:
        return DeviceAddress(int.__add__(self, offset), self.life)

    __radd__ = __add__


def is_lost(thing: Buffer | object) -> bool:
    """True if a buffer, or something with a ``life`` (a program, an address), belongs to an opening that has ended."""
    owner: Any = thing.address if isinstance(thing, Buffer) else thing
    life: Lifetime | None = getattr(owner, "life", None)
    return life is not None and life.lost

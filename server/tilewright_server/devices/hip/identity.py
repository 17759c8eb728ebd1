"""Identity of a device in every process of the machine."""

from __future__ import annotations

from typing import Any

__all__ = ["describe_pci", "describe_uuid", "identity_of"]

_DIGITS = frozenset(b"0123456789abcdef")


def describe_pci(domain: int, bus: int, device: int) -> str:
    """A device's place on the PCI bus."""
    return f"{domain:08x}:{bus:02x}:{device:02x}.0"


def describe_uuid(data: bytes, pci: str) -> str:
    """A device's UUID as ROCm's tools write it.

    The runtime gives 16 hexadecimal digits as text. Boards without a number of their own have something else there, the
    same for all: those are called by their place, ``pci``.
    """
    return f"GPU-{data.decode()}" if len(data) == 16 and set(data.lower()) <= _DIGITS else f"PCI-{pci}"


def identity_of(raw: Any, ordinal: int) -> tuple[Any, str]:
    """The runtime's result, and what ``describe_uuid`` makes of a device. ``raw`` is ``hip.hip``."""
    result, uuid = raw.hipDeviceGetUuid(ordinal)
    if result:
        return result, ""
    attribute = raw.hipDeviceAttribute_t
    place = []
    for name in ("PciDomainId", "PciBusId", "PciDeviceId"):
        result, value = raw.hipDeviceGetAttribute(getattr(attribute, f"hipDeviceAttribute{name}"), ordinal)
        if result:
            return result, ""
        place.append(int(value))
    return result, describe_uuid(bytes(uuid.bytes), describe_pci(*place))

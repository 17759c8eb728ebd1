"""Answers of drivers as typed errors. Knows names of result codes only, so that it needs no driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright_kit.types.errors import DeviceError, ResourceExhaustedError, TilewrightError, UnavailableError
from tilewright_server.devices.contract import DeviceLostError

__all__ = ["Results"]


@dataclass(frozen=True, slots=True)
class Results:
    """The names of a driver's results, by what they mean."""

    lost: frozenset[str]
    """After them every call of the process fails: only a new process can use the device again."""
    unusable: frozenset[str]
    """The device cannot be opened now."""
    full: str
    """Out of memory."""
    busy: str
    """Name of the result for work that is still under way: no error."""
    unknown: str
    """Says nothing: the device may be lost, or not."""
    missing: str
    """A binary has no such entry."""
    reasons: Mapping[str, str]
    """Meaning of some of ``lost`` in words."""
    imports: Mapping[str, str]
    """Why memory of another process cannot be mapped: a name of ``sharing.CAUSES``."""
    rule: str
    """Rule of errors that are no common fault."""
    look: str
    """The vendor's tool that shows what the devices do."""

    def lost_error(self, name: str, device: str = "") -> DeviceLostError:
        """The error for a result by name that ends the use of a device."""
        return DeviceLostError(f"{self.reasons.get(name, 'the device failed')} ({name})", device=device)

    def error_of(self, name: str, device: str = "", doing: str = "") -> TilewrightError:
        """The error for a result by name. ``doing`` completes "the driver refused ..." for what is no common fault."""
        if name in self.lost:
            return self.lost_error(name, device)
        if name == self.full:
            return ResourceExhaustedError(
                "the device has not enough memory left",
                field="device",
                value=device,
                rule="device_memory",
                fix="free buffers or regions, end other users of the device, or ask for less",
                retry_after_s=1.0,
            )
        if name in self.unusable:
            return UnavailableError(
                f"the device cannot be used at the moment ({name})",
                field="device",
                value=device,
                rule="device_driver",
                fix=f"look at `tilewright doctor` and `{self.look}` on the server's machine",
                retry_after_s=5.0,
            )
        return DeviceError(
            f"the driver refused {doing or 'a request'} ({name})",
            field="driver",
            value=name,
            rule=self.rule,
            fix="report it as a fault of the server or of the operation's plugin, with the request",
        )

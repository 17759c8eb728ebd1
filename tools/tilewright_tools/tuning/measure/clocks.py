"""Reasons why a GPU's clocks are held down at this moment, as NVIDIA's management library (NVML) tells them.

NVML comes with the driver, so that nothing need be installed. Where it is not there, nothing is known.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p
from typing import Any

__all__ = ["THROTTLED", "Clocks", "reasons_of"]

THROTTLED = {
    0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}  # fmt: skip
"""Bits of ``nvmlDeviceGetCurrentClocksEventReasons`` under which a time says nothing. The cap of power (0x04) is none
of them: large products run into it whenever they run, a model's too.
"""
_SM = 1
"""``NVML_CLOCK_SM``."""


def reasons_of(bits: int) -> str:
    """Words of the bits that count; empty if there are none."""
    return ", ".join(text for bit, text in THROTTLED.items() if bits & bit)


class Clocks:
    """One GPU's clocks. ``close`` gives the library back. Nothing is known of other devices, and without NVML."""

    def __init__(self, kind: str, bus_id: str, library: str = "libnvidia-ml.so.1") -> None:
        """``bus_id`` is the address on the PCI bus, the same for every process."""
        self._nvml: Any = None
        self._device = c_void_p()
        if kind != "cuda" or not bus_id:
            return
        try:
            nvml = ctypes.CDLL(library)
            if nvml.nvmlInit_v2():
                return
            if nvml.nvmlDeviceGetHandleByPciBusId_v2(c_char_p(bus_id.encode()), byref(self._device)):
                nvml.nvmlShutdown()
                return
        except (OSError, AttributeError):
            return
        self._nvml = nvml

    @property
    def known(self) -> bool:
        return self._nvml is not None

    def throttled(self) -> str:
        """Reasons, in words, why the clocks are held down now; empty if there are none, or nothing is known."""
        bits = c_ulonglong()
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            read = getattr(self._nvml, name, None)
            if read is not None:
                return reasons_of(bits.value) if read(self._device, byref(bits)) == 0 else ""
        return ""

    def mhz(self) -> int:
        """The clock of the units; 0 if it is not known."""
        value = c_uint()
        if self._nvml is None or self._nvml.nvmlDeviceGetClockInfo(self._device, _SM, byref(value)):
            return 0
        return int(value.value)

    def close(self) -> None:
        """Idempotent."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            nvml.nvmlShutdown()

"""State of NVIDIA GPUs for metrics, from the driver's management library (NVML): use, power, energy, memory of all
processes together. It comes with the driver, so that nothing need be installed; without it nothing is known.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GpuState", "GpuStates"]

WAIT_S = 0.25
"""Time that a scrape waits for NVML, which may hang with a GPU that is lost."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU. ``values`` lacks what the driver does not tell of it (of MIG devices, for example)."""

    uuid: str
    values: dict[str, float] = field(default_factory=dict)
    """``utilization`` (0 to 1), ``power_usage`` and ``power_limit`` (W), ``energy_consumption`` (J since the driver was
    loaded), ``memory_total_bytes``, ``memory_used_bytes``."""


class GpuStates:
    """GPUs by PCI address, asked anew with each ``read``."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        self._library = library
        self._nvml: Any = None
        self._reading: threading.Thread | None = None
        self._found: list[GpuState] = []

    def read(self, gpus: Iterable[tuple[str, str]]) -> list[GpuState]:
        """States of the GPUs of these UUIDs and PCI addresses; none while the driver does not answer."""
        wanted = list(gpus)
        if not wanted:
            return []
        if self._reading is None or not self._reading.is_alive():
            self._found = []
            self._reading = threading.Thread(target=self._read, args=(wanted,), name="nvml", daemon=True)
            self._reading.start()
        self._reading.join(WAIT_S)
        return [] if self._reading.is_alive() else self._found

    def _read(self, wanted: list[tuple[str, str]]) -> None:
        if self._nvml is None:
            try:
                nvml = ctypes.CDLL(self._library)
                if nvml.nvmlInit_v2():
                    return
            except (OSError, AttributeError):
                return
            self._nvml = nvml
        self._found = [GpuState(uuid, values) for uuid, pci in wanted if (values := self._values(uuid, pci))]

    def _values(self, uuid: str, pci: str) -> dict[str, float]:
        device = c_void_p()
        # MIG devices have ids of another form; the GPU that they are parts of is found by its place.
        for find, key in (("nvmlDeviceGetHandleByUUID", uuid), ("nvmlDeviceGetHandleByPciBusId_v2", pci)):
            if getattr(self._nvml, find)(c_char_p(key.encode()), byref(device)) == 0:
                break
        else:
            return {}
        use, memory, usage, limit, energy = _Utilization(), _Memory(), c_uint(), c_uint(), c_ulonglong()
        values: dict[str, float] = {}
        if self._told("nvmlDeviceGetUtilizationRates", device, use):
            values["utilization"] = use.gpu / 100
        if self._told("nvmlDeviceGetPowerUsage", device, usage):
            values["power_usage"] = usage.value / 1000
        if self._told("nvmlDeviceGetEnforcedPowerLimit", device, limit):
            values["power_limit"] = limit.value / 1000
        if self._told("nvmlDeviceGetTotalEnergyConsumption", device, energy):
            values["energy_consumption"] = energy.value / 1000
        if self._told("nvmlDeviceGetMemoryInfo", device, memory):
            values |= {"memory_total_bytes": memory.total, "memory_used_bytes": memory.used}
        return values

    def _told(self, name: str, device: c_void_p, result: Any) -> bool:
        function = getattr(self._nvml, name, None)
        return function is not None and function(device, byref(result)) == 0

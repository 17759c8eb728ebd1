"""Asks HIP's runtime what devices there are, in a process that ends at once.

    python -m tilewright_server.devices.hip.probe

Initialising the runtime opens device files, starts threads and takes memory: the server's own process must not do that
to find out what there is. Prints one JSON object: ``driver`` (version as a number), ``lacking`` (functions that the
runtime has not) and ``devices`` (those that cannot be asked have an ``error``), or ``error`` and ``reason``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from tilewright_kit.types.errors import UnavailableError
from tilewright_server.devices.hip.driver.driver import load_api
from tilewright_server.devices.hip.driver.functions import REQUIRED, lacking
from tilewright_server.devices.hip.identity import identity_of

__all__ = ["ATTRIBUTES", "main", "probe"]

ATTRIBUTES: Mapping[str, str] = {
    "clock_khz": "ClockRate",
    "units": "MultiprocessorCount",
    "compute_units": "PhysicalMultiProcessorCount",
    "pci_domain": "PciDomainId",
    "pci_bus": "PciBusId",
    "pci_device": "PciDeviceId",
    "memory_clock_khz": "MemoryClockRate",
    "memory_bus_bits": "MemoryBusWidth",
    "l2_bytes": "L2CacheSize",
    "shared_bytes": "MaxSharedMemoryPerBlock",
    "wave": "WarpSize",
    "virtual_memory": "VirtualMemoryManagementSupported",
    "memory_pools": "MemoryPoolsSupported",
}
"""By the end of their names in ``hipDeviceAttribute_t``."""


class ProbeError(Exception):
    """The runtime refused; the text is its result's name."""


def _value(answer: tuple[Any, ...]) -> Any:
    if answer[0]:
        raise ProbeError(answer[0].name)
    return answer[1] if len(answer) > 1 else None


def probe(raw: Any) -> dict[str, Any]:
    """Answers of the runtime. Raises ``ProbeError``, ``RuntimeError`` if it is not there or lacks a function."""
    _value(raw.hipInit(0))
    driver = int(_value(raw.hipRuntimeGetVersion()))
    absent = lacking()
    if any(name in REQUIRED for name in absent):
        return {"driver": driver, "lacking": absent, "devices": []}
    count = int(_value(raw.hipGetDeviceCount()))
    return {"driver": driver, "lacking": absent, "devices": [_asked(raw, ordinal) for ordinal in range(count)]}


def _asked(raw: Any, ordinal: int) -> dict[str, Any]:
    """Record of what the runtime says of one device, or that it says nothing: others are not to be lost with it."""
    try:
        return _device(raw, ordinal)
    except ProbeError as error:
        return {"ordinal": ordinal, "error": str(error)}


def _device(raw: Any, ordinal: int) -> dict[str, Any]:
    properties = _value(raw.hipGetDeviceProperties(ordinal))
    found: dict[str, Any] = {
        "ordinal": ordinal,
        "name": _text(properties.name),
        "gcn_arch_name": _text(properties.gcnArchName),
        "uuid": _value(identity_of(raw, ordinal)),
        "memory_bytes": int(properties.totalGlobalMem),
    }
    for key, name in ATTRIBUTES.items():
        attribute = getattr(raw.hipDeviceAttribute_t, f"hipDeviceAttribute{name}")
        result, value = raw.hipDeviceGetAttribute(attribute, ordinal)
        found[key] = 0 if result else int(value)  # older runtimes do not know all of them
    return found


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def main() -> int:
    """Print what there is. Always returns 0: what failed is in what is printed."""
    try:
        answer = probe(load_api())
    except UnavailableError as error:
        answer = {"error": "package", "reason": error.reason}
    except ProbeError as error:
        answer = {"error": "driver", "reason": str(error)}
    except RuntimeError as error:
        answer = {"error": "library" if "dlopen" in str(error) else "old", "reason": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Asks the CUDA driver what devices there are, in a process that ends at once.

    python -m tilewright_server.devices.cuda.probe

Initialising the driver opens device files, starts threads and takes memory: the server's own process must not do that
to find out what there is. Uses the driver's library directly, so that it works without NVIDIA's Python packages, and
prints one JSON object: ``driver`` (version as a number) and ``devices``, or ``error`` and ``reason``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["ATTRIBUTES", "main", "probe"]

ATTRIBUTES: Mapping[str, int] = {
    "clock_khz": 13,
    "units": 16,
    "integrated": 18,
    "compute_mode": 20,
    "pci_bus": 33,
    "pci_device": 34,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "pci_domain": 50,
    "major": 75,
    "minor": 76,
    "shared_bytes": 97,
    "virtual_memory": 102,
    "shareable_fds": 103,
    "memory_pools": 115,
}
"""By number, from the enumeration ``CUdevice_attribute`` of the CUDA driver API. ``shared_bytes`` is
``MAX_SHARED_MEMORY_PER_BLOCK_OPTIN``."""


class ProbeError(Exception):
    """The driver refused; the text is its result's name or number."""


def _check(library: Any, status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(name))
        raise ProbeError((name.value or str(status).encode()).decode())


def probe(library: Any) -> dict[str, Any]:
    """Answers of the driver. Raises ``ProbeError``, or ``AttributeError`` if it lacks a function."""
    _check(library, library.cuInit(0))
    version, count = ctypes.c_int(), ctypes.c_int()
    _check(library, library.cuDriverGetVersion(ctypes.byref(version)))
    _check(library, library.cuDeviceGetCount(ctypes.byref(count)))
    return {"driver": version.value, "devices": [_device(library, ordinal) for ordinal in range(count.value)]}


def _device(library: Any, ordinal: int) -> dict[str, Any]:
    handle, total = ctypes.c_int(), ctypes.c_size_t()
    name, uuid = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    _check(library, library.cuDeviceGet(ctypes.byref(handle), ordinal))
    _check(library, library.cuDeviceGetName(name, len(name), handle))
    _check(library, library.cuDeviceGetUuid_v2(uuid, handle))
    _check(library, library.cuDeviceTotalMem_v2(ctypes.byref(total), handle))
    found: dict[str, Any] = {
        "ordinal": ordinal,
        "name": name.value.decode("utf-8", "replace"),
        "uuid": bytes(uuid).hex(),
        "memory_bytes": total.value,
    }
    for key, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        _check(library, library.cuDeviceGetAttribute(ctypes.byref(value), number, handle))
        found[key] = value.value
    return found


def main() -> int:
    """Print what there is. Always returns 0: what failed is in what is printed."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        answer: dict[str, Any] = {"error": "library", "reason": str(error)}
    else:
        try:
            answer = probe(library)
        except ProbeError as error:
            answer = {"error": "driver", "reason": str(error)}
        except AttributeError as error:
            answer = {"error": "old", "reason": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which NVIDIA devices the machine has, without touching the driver in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright_arch import ArchSpec, from_compute_capability
from tilewright_kit.contract.device import DeviceInfo
from tilewright_server.devices.cuda.driver.driver import CONTAINER_FIX, DRIVER_FIX, MIN_DRIVER
from tilewright_server.devices.gpu.discovery import Discovery, Kind, ask, sort_out
from tilewright_server.protocol.subprocess_command import run_module

__all__ = ["Discovery", "describe_uuid", "find", "has_driver", "parse"]

_PROBE = "tilewright_server.devices.cuda.probe"
_NODES = ("dev/nvidiactl", "dev/dxg")
_LIBRARIES = (
    "usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "usr/lib/aarch64-linux-gnu/libcuda.so.1",
    "usr/lib64/libcuda.so.1",
    "usr/lib/libcuda.so.1",
    "usr/lib/wsl/lib/libcuda.so.1",
    "usr/local/nvidia/lib64/libcuda.so.1",
)
_SYSTEM = Path("/")


def has_driver(root: Path = _SYSTEM) -> bool:
    """True if the machine shows a device node or the driver's library: only then is it worth asking."""
    return any((root / path).exists() for path in (*_NODES, *_LIBRARIES))


def find(kind: str = "cuda", root: Path = _SYSTEM, command: Sequence[str] = ()) -> Discovery:
    """Ask a short-lived process (``command`` is for tests). It sees the devices that this process may use: the
    driver's own variables (CUDA_VISIBLE_DEVICES) are passed on to it."""
    if not has_driver(root):
        return Discovery(problem="no NVIDIA driver and no device node (/dev/nvidiactl)", fix=DRIVER_FIX)
    node = any((root / path).exists() for path in _NODES)
    return ask("NVIDIA", command or run_module(_PROBE), lambda record: parse(record, kind, node), f"python -m {_PROBE}")


def parse(record: Mapping[str, Any], kind: str = "cuda", node: bool = True) -> Discovery:
    """Discovery from the probe's answer. ``node``: whether there is a device node."""
    reason = str(record.get("reason", ""))
    match record.get("error"):
        case "library":
            return Discovery(
                problem="the NVIDIA driver's library (libcuda.so.1) cannot be loaded",
                fix=f"{DRIVER_FIX}; in a container, {CONTAINER_FIX}",
            )
        case "old":
            return Discovery(problem="the NVIDIA driver is too old", fix=DRIVER_FIX)
        case "driver":
            fix = "look at nvidia-smi" if node else f"there is no device node: {CONTAINER_FIX}"
            return Discovery(problem=f"the NVIDIA driver cannot be used ({reason})", fix=fix)
    driver = int(record["driver"])
    if driver < MIN_DRIVER:
        return Discovery(
            driver=driver,
            problem=f"the NVIDIA driver is for CUDA {driver // 1000}.{driver % 1000 // 10}",
            fix=f"{DRIVER_FIX} (CUDA 13.0)",
        )
    return sort_out(record["devices"], kind, driver, _KIND)


def describe_uuid(data: bytes) -> str:
    """A device's UUID as nvidia-smi writes it."""
    text = data.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _bandwidth(found: Mapping[str, Any]) -> int:
    """Bytes a second: two transfers for each cycle of the memory's clock, over the whole bus."""
    return int(found["memory_clock_khz"]) * 2000 * int(found["memory_bus_bits"]) // 8


def _info(name: str, kind: str, found: Mapping[str, Any], arch: ArchSpec) -> DeviceInfo:
    known = arch.throughput
    same = known.units == found["units"]
    return DeviceInfo(
        id=name,
        kind=kind,
        name=found["name"],
        # The spec's clock is the one that its rates were measured at; a chip of another size has another.
        arch=arch.with_device(
            lds_bytes=found["shared_bytes"],
            units=found["units"],
            clock_mhz=known.clock_mhz if same and known.clock_mhz else found["clock_khz"] // 1000,
            memory_bytes_per_second=_bandwidth(found) or known.memory_bytes_per_second,
        ),
        units=found["units"],
        memory_bytes=found["memory_bytes"],
        attributes={
            "uuid": describe_uuid(bytes.fromhex(found["uuid"])),
            "ordinal": found["ordinal"],
            "compute_capability": f"{found['major']}.{found['minor']}",
            "pci": f"{found['pci_domain']:08x}:{found['pci_bus']:02x}:{found['pci_device']:02x}.0",
            "l2_bytes": found["l2_bytes"],
        },
    )


def _differences(found: Mapping[str, Any], arch: ArchSpec) -> list[str]:
    """Where the device is not what its arch's spec says; its own figures are used."""
    notes = []
    if arch.throughput.units and arch.throughput.units != found["units"]:
        notes.append(f"{found['units']} SMs, where the figures of {arch.id} are for {arch.throughput.units}")
    if arch.lds_bytes != found["shared_bytes"]:
        notes.append(f"{found['shared_bytes']} bytes of shared memory a workgroup, {arch.id} says {arch.lds_bytes}")
    if not found["memory_pools"] or not found["virtual_memory"]:
        notes.append("its memory cannot be shared or pooled")
    if found["compute_mode"] == 2:  # CU_COMPUTEMODE_PROHIBITED
        notes.append("its compute mode forbids all use (nvidia-smi -c DEFAULT)")
    return notes


_KIND = Kind(
    arch_of=lambda record: from_compute_capability(record["major"], record["minor"]),
    differences=_differences,
    info=_info,
    other_fix="use a GPU that is (`tilewright arch list`)",
    nothing=(
        "the NVIDIA driver shows no device that kernels can be made for",
        "see CUDA_VISIBLE_DEVICES and `tilewright arch list`",
    ),
)

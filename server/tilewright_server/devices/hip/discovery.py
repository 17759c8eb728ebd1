"""Which AMD devices the machine has, without touching the driver in this process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright_arch import ArchSpec, from_gcn_arch_name
from tilewright_kit.contract.device import DeviceInfo
from tilewright_server.devices.contract import Absence
from tilewright_server.devices.gpu.discovery import Discovery, Kind, ask, sort_out
from tilewright_server.devices.hip.driver.driver import CONTAINER_FIX, DRIVER_FIX, INSTALL, MIN_DRIVER, version_text
from tilewright_server.devices.hip.driver.functions import REQUIRED, spared
from tilewright_server.devices.hip.identity import describe_pci
from tilewright_server.protocol.subprocess_command import run_module

__all__ = ["Discovery", "find", "has_driver", "parse", "seen_by_kernel", "version_text"]

_PROBE = "tilewright_server.devices.hip.probe"
_NODE = "dev/kfd"
_TOPOLOGY = "sys/class/kfd/kfd/topology/nodes"
_LIBRARIES = (
    "opt/rocm/lib/libamdhip64.so",
    "usr/lib/x86_64-linux-gnu/libamdhip64.so",
    "usr/lib64/libamdhip64.so",
    "usr/lib/libamdhip64.so",
)
_SYSTEM = Path("/")
SILENT_FIX = (
    "look at amd-smi; to leave it out, name the others in ROCR_VISIBLE_DEVICES (by numbers, or by the names that "
    "rocminfo shows) where the server is started"
)
_GROUPS_FIX = "let the server's user into the groups that own /dev/kfd and /dev/dri/renderD* (render, video)"


def has_driver(root: Path = _SYSTEM) -> bool:
    """True if the machine shows the driver's device node or the runtime: only then is it worth asking."""
    return any((root / path).exists() for path in (_NODE, *_LIBRARIES))


def seen_by_kernel(root: Path = _SYSTEM) -> tuple[str, ...]:
    """The GPUs that the kernel's driver lists for everybody, as ``gfx942``: no runtime is needed to read that."""
    found = []
    for file in sorted(root.glob(f"{_TOPOLOGY}/*/properties")):
        try:
            words = dict(line.split(None, 1) for line in file.read_text("ascii").splitlines() if " " in line)
            version = int(words.get("gfx_target_version", "0"))
        except (OSError, ValueError):  # a node that this user may not see
            continue
        if version:
            found.append(f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}")
    return tuple(found)


def find(kind: str = "hip", root: Path = _SYSTEM, command: Sequence[str] = ()) -> Discovery:
    """Ask a short-lived process (``command`` is for tests). It sees the devices that this process may use: the
    runtime's own variables (HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES) are passed on to it."""
    if not has_driver(root):
        return Discovery(problem="no AMD driver (/dev/kfd) and no ROCm runtime", fix=DRIVER_FIX)
    return ask("AMD", command or run_module(_PROBE), lambda record: parse(record, kind, root), f"python -m {_PROBE}")


def parse(record: Mapping[str, Any], kind: str = "hip", root: Path = _SYSTEM) -> Discovery:
    """Discovery from the probe's answer."""
    reason = str(record.get("reason", ""))
    seen = seen_by_kernel(root)
    there = f"; the kernel's driver shows {', '.join(seen)}" if seen else ""
    match record.get("error"):
        case "package":
            return Discovery(problem=f"{reason}{there}", fix=INSTALL)
        case "library":
            return Discovery(problem=f"ROCm's runtime (libamdhip64.so) cannot be loaded{there}", fix=DRIVER_FIX)
        case "old":
            lacking = re.search(r"\bhip[A-Z]\w+", reason)
            what = f"it has no {lacking[0]}" if lacking else "it lacks functions"
            return Discovery(problem=f"ROCm's runtime is too old: {what}", fix=DRIVER_FIX)
        case "driver":
            return Discovery(problem=f"the AMD driver cannot be used ({reason}){there}", fix=_access_fix(root))
    driver = int(record["driver"])
    if driver < MIN_DRIVER:
        return Discovery(driver=driver, problem=f"the runtime is that of {version_text(driver)}", fix=DRIVER_FIX)
    absent = [str(name) for name in record.get("lacking", ())]
    if needed := [name for name in absent if name in REQUIRED]:
        text = f"the runtime ({version_text(driver)}) has no {', '.join(needed)}"
        return Discovery(driver=driver, problem=text, fix=DRIVER_FIX)
    answered = [device for device in record["devices"] if "error" not in device]
    silent = {
        f"{kind}:{device['ordinal']}": Absence(f"the runtime cannot be asked about it ({device['error']})", SILENT_FIX)
        for device in record["devices"]
        if "error" in device
    }
    found = sort_out(answered, kind, driver, _KIND)
    notes = (*found.notes, *spared(absent), *_disguised(found, seen))
    return replace(found, notes=notes, left_out={**found.left_out, **silent})


def _disguised(found: Discovery, seen: Sequence[str]) -> list[str]:
    """Devices whose names are not those that the kernel's driver has for them."""
    names = {info.id: str(info.attributes["gcn_arch_name"]).partition(":")[0] for info in found.devices}
    return [
        f"{device}: its runtime calls it {name}, the kernel's driver shows {', '.join(seen)}: if "
        "HSA_OVERRIDE_GFX_VERSION is set, kernels may fail or be wrong; unset it"
        for device, name in names.items()
        if seen and name not in seen
    ]


def _access_fix(root: Path) -> str:
    """Fix for missing access to the kernel's driver."""
    node = root / _NODE
    if not node.exists():
        return f"there is no /dev/kfd: load the amdgpu kernel driver; in a container, {CONTAINER_FIX}"
    if not os.access(node, os.R_OK | os.W_OK):
        return f"there is no permission on /dev/kfd: {_GROUPS_FIX}; in a container, --group-add them"
    return f"look at amd-smi, and at HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES; {_GROUPS_FIX}"


def _units(found: Mapping[str, Any], arch: ArchSpec) -> int:
    """Compute units. On gfx11 and later the runtime counts pairs of them, and the compute units elsewhere."""
    counts = (int(found["units"]), int(found["compute_units"]))
    return arch.throughput.units if arch.throughput.units in counts else max(counts)


def _info(name: str, kind: str, found: Mapping[str, Any], arch: ArchSpec) -> DeviceInfo:
    known, units = arch.throughput, _units(found, arch)
    same = known.units == units
    # Transfers a cycle differ between kinds of memory, and the runtime does not tell them: two are the fewest.
    least = int(found["memory_clock_khz"]) * 2000 * int(found["memory_bus_bits"]) // 8
    return DeviceInfo(
        id=name,
        kind=kind,
        name=found["name"],
        # The spec's clock is the one that its rates hold at; a chip of another size has another.
        arch=arch.with_device(
            lds_bytes=found["shared_bytes"],
            units=units,
            clock_mhz=known.clock_mhz if same and known.clock_mhz else found["clock_khz"] // 1000,
            memory_bytes_per_second=known.memory_bytes_per_second or least,
        ),
        units=units,
        memory_bytes=found["memory_bytes"],
        attributes={
            "uuid": found["uuid"],
            "ordinal": found["ordinal"],
            "gcn_arch_name": found["gcn_arch_name"],
            "pci": describe_pci(found["pci_domain"], found["pci_bus"], found["pci_device"]),
            "l2_bytes": found["l2_bytes"],
        },
    )


def _differences(found: Mapping[str, Any], arch: ArchSpec) -> list[str]:
    """Where the device is not what its arch's spec says; its own figures are used."""
    notes = []
    units = _units(found, arch)
    if arch.throughput.units and arch.throughput.units != units:
        notes.append(f"{units} compute units, where the figures of {arch.id} are for {arch.throughput.units}")
    if arch.lds_bytes != found["shared_bytes"]:
        notes.append(f"{found['shared_bytes']} bytes of LDS a workgroup, {arch.id} says {arch.lds_bytes}")
    if not found["memory_pools"]:
        notes.append("its runtime says that it has no memory pools, without which it cannot be opened")
    elif not found["virtual_memory"]:
        notes.append("descriptors of its memory cannot be mapped, handles can")
    return notes


_KIND = Kind(
    arch_of=lambda record: from_gcn_arch_name(record["gcn_arch_name"]),
    differences=_differences,
    info=_info,
    other_fix=(
        "use a GPU that is; if the runtime stumbles over this one, leave it out of ROCR_VISIBLE_DEVICES; "
        "docs/adding-an-arch.md says how an arch is added"
    ),
    nothing=(
        "ROCm shows no device that kernels can be made for",
        "see HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and `tilewright arch list`",
    ),
)

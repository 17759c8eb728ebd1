"""Recognising the CPU that this process runs on."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

from .errors import UnsupportedDeviceError
from .loader import of_kind
from .spec import ArchSpec, Caches

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def detect_cpu(cpuinfo: str | None = None, machine: str | None = None, cache_dir: Path | None = None) -> ArchSpec:
    """The best CPU level of this machine with every optional feature that it has.

    ``cpuinfo`` is the text of ``/proc/cpuinfo`` and ``machine`` what ``uname -m`` says; both
    are read from the machine when left out. Real cache sizes replace the spec's where
    ``cache_dir`` (by default the kernel's folder for processor 0, unless ``cpuinfo`` was
    given) tells them. Raises ``UnsupportedDeviceError``.
    """
    if cpuinfo is None:
        cache_dir = cache_dir or _CACHES
        cpuinfo = _read(_CPUINFO) or ""
    machine = (machine or platform.machine()).lower()
    flags = _flags(cpuinfo)
    # A higher level lists the flags of the lower ones too, so the longest list is the best.
    levels = [spec for spec in of_kind("cpu") if machine in spec.match.machines]
    usable = [spec for spec in levels if flags.issuperset(spec.match.cpu_flags)]
    if not usable:
        lowest = min(levels, key=lambda spec: len(spec.match.cpu_flags), default=None)
        if lowest is None:
            raise UnsupportedDeviceError(f"no CPU spec covers machine type {machine!r}")
        missing = sorted(set(lowest.match.cpu_flags) - flags)
        raise UnsupportedDeviceError(
            f"this {machine} CPU is not known to have {', '.join(missing)}, "
            f"which {lowest.name}, the lowest level, needs"
        )
    best = max(usable, key=lambda spec: len(spec.match.cpu_flags))
    present = [f.name for f in best.optional_features.values() if flags.issuperset(f.cpu_flags)]
    spec = best.with_features(present)
    return spec if cache_dir is None else spec.with_caches(read_caches(cache_dir, spec.caches))


def read_caches(folder: Path, default: Caches) -> Caches:
    """Cache sizes from a ``/sys/devices/system/cpu/cpuN/cache`` folder.

    What the folder does not tell is taken from ``default``.
    """
    found: dict[str, int] = {}
    for entry in sorted(folder.glob("index*")):
        size = _size(_read(entry / "size"))
        level = (_read(entry / "level") or "").strip()
        if size is None or (_read(entry / "type") or "").strip() == "Instruction":
            continue
        if level in ("1", "2", "3"):
            found[f"l{level}_bytes"] = size
        line = (_read(entry / "coherency_line_size") or "").strip()
        if line.isdigit() and int(line) > 0:
            found["line_bytes"] = int(line)
    return dataclasses.replace(default, **found)


def _flags(cpuinfo: str) -> frozenset[str]:
    # Cores may differ (big and little): only what all of them have counts.
    common: frozenset[str] | None = None
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
            common = flags if common is None else common & flags
    return common or frozenset()


def _size(text: str | None) -> int | None:
    text = (text or "").strip()
    unit = _UNITS.get(text[-1:], 1)
    digits = text[:-1] if text[-1:] in _UNITS else text
    return int(digits) * unit if digits.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except OSError:
        return None

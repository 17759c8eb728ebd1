"""Which CPUs of the machine this process may use, and how much memory it may have."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from tilewright_arch import ArchError, ArchSpec, detect_cpu, load
from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError

__all__ = ["Topology", "cgroup_folders", "choose_arch", "find_topology"]

_SYSTEM = Path("/")


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """``cpus`` are the ones to pin threads to, one for each core; ``memory_bytes`` what the process may use at most."""

    cpus: tuple[int, ...]
    memory_bytes: int
    model: str


def find_topology(threads: int = 0, root: Path = _SYSTEM, allowed: frozenset[int] | None = None) -> Topology:
    """The usable cores: those of the affinity mask, one hardware thread of each, no more than the cgroup pays for.

    ``threads`` replaces the count (hardware threads of one core are then used before any core gets two). ``root`` and
    ``allowed`` are for tests. Raises ``InvalidArgumentError`` for more threads than CPUs.
    """
    mask = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    cores = _one_per_core(mask, root)
    if threads:
        if threads > len(mask):
            raise InvalidArgumentError(
                f"this process may use {len(mask)} CPUs",
                field="threads",
                value=threads,
                rule="cpu_threads",
                fix=f"ask for at most {len(mask)} threads, or 0 for one per core",
            )
        cpus = [*cores, *(cpu for cpu in mask if cpu not in cores)][:threads]
    else:
        quota = _quota(root)
        # Rounded down: threads that wait for each other are hit hard when the last one is throttled.
        cpus = cores[: max(1, int(quota + 0.01))] if quota else cores
    return Topology(tuple(cpus), _memory(root), _model(root))


def choose_arch(name: str) -> ArchSpec:
    """The machine's own level, or the one called ``name`` if the machine can run it.

    Raises ``UnsupportedError``.
    """
    try:
        machine = detect_cpu()
        if not name:
            return machine
        wanted = load(name)
    except ArchError as error:
        raise UnsupportedError(
            str(error),
            field="cpu_arch",
            value=name,
            rule="cpu_arch",
            fix="leave it empty, or list the levels with `tilewright arch list`",
        ) from error
    flags = frozenset(machine.match.cpu_flags)
    if (
        wanted.kind != "cpu"
        or not flags.issuperset(wanted.match.cpu_flags)
        or not set(wanted.features) <= set(machine.features)
    ):
        raise UnsupportedError(
            f"this machine is {machine.id} and cannot run code for {wanted.id}",
            field="cpu_arch",
            value=name,
            rule="cpu_arch",
            fix=f"use {machine.id} or a lower level, or leave it empty",
        )
    return wanted.with_caches(machine.caches)


def _one_per_core(cpus: list[int], root: Path) -> list[int]:
    seen: set[str] = set()
    first: list[int] = []
    for cpu in cpus:
        siblings = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            first.append(cpu)
    return first


def _quota(root: Path) -> float | None:
    """CPUs that the cgroup pays for, the strictest of its ancestors; None without a limit."""
    limits = []
    for folder in cgroup_folders(root, "cpu"):
        text = _read(folder / "cpu.max")
        if text is not None:
            part, _, period = text.partition(" ")
            limits.append(float(part) / float(period or 100000) if part.isdigit() else None)
            continue
        part, period = _read(folder / "cpu.cfs_quota_us") or "-1", _read(folder / "cpu.cfs_period_us") or "100000"
        limits.append(float(part) / float(period) if part.isdigit() else None)
    return min((limit for limit in limits if limit), default=None)


def _memory(root: Path) -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = []
    for folder in cgroup_folders(root, "memory"):
        text = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes") or ""
        if text.isdigit():
            limits.append(int(text))
    return min([total, *limits])


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The folders of this process's group and its ancestors, of version 2 and of ``controller`` in version 1."""
    folders: list[Path] = []
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            bases = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            bases = [mount / controllers, mount / controller]
        else:
            continue
        group = Path(path.lstrip("/"))
        folders += [base / part for base in bases for part in (group, *group.parents)]
    return list(dict.fromkeys(folders))


def _model(root: Path) -> str:
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "CPU part"):
            return value.strip()
    return "CPU"


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None

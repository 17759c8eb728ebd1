"""How much memory this process could still get: of the machine, and of the groups of processes (cgroups) it is in.

The system promises memory of any size, and ends a process when pages are used that it does not have. In a container
that happens at the container's limit, however much the machine has.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["available"]


def available(root: Path = Path("/")) -> int:
    """Bytes that could still be used, the least of what the machine and each group with a limit have left.

    Swap that is free counts, and so do pages of files, which the system drops for those of programs. ``sys.maxsize`` if
    nothing tells. ``root`` is where the system's files are found.
    """
    machine = _table(root / "proc/meminfo")
    swap = machine.get("SwapFree", 0) << 10
    rooms = [room for folder in _folders(root) for room in _rooms(folder, swap)]
    if "MemAvailable" in machine:
        rooms.append((machine["MemAvailable"] << 10) + swap)
    return max(0, min(rooms, default=sys.maxsize))


def _rooms(folder: Path, swap: int) -> list[int]:
    """Memory that a group has left: nothing without a limit, or where its files cannot be read."""
    stat = _table(folder / "memory.stat")
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    if limit is not None and used is not None:  # version 2, which counts swap by itself
        may_swap, swapped = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
        if may_swap is not None:
            swap = min(swap, max(0, may_swap - (swapped or 0)))
        return [limit - used + stat.get("inactive_file", 0) + stat.get("active_file", 0) + swap]
    files = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    rooms = []
    # Version 1: one limit on memory, and one on memory with swap. What "unlimited" is there is a number, too.
    for name, more in (("memory", swap), ("memory.memsw", 0)):
        limit, used = _number(folder / f"{name}.limit_in_bytes"), _number(folder / f"{name}.usage_in_bytes")
        if limit is not None and used is not None:
            rooms.append(limit - used + files + more)
    return rooms


def _folders(root: Path) -> list[Path]:
    """The folders of this process's memory group and its ancestors, in versions 1 and 2.

    In a container the path may be the machine's, while the container sees its own group where groups are mounted: that
    is the last of the ancestors.
    """
    mount = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            bases = [mount, mount / "unified"]
        elif "memory" in controllers.split(","):
            bases = [mount / controllers, mount / "memory"]
        else:
            continue
        group = Path(path.lstrip("/"))
        folders += [base / part for base in bases for part in (group, *group.parents)]
    return list(dict.fromkeys(folders))


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as in ``/proc/meminfo`` and ``memory.stat``."""
    words = [line.split() for line in _read(path).splitlines()]
    return {line[0].rstrip(":"): int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _number(path: Path) -> int | None:
    """None where there is no limit (``max``), or no such file."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""

"""`tilewright top`: kernels that run now, where and how fast, by the difference of two looks at a server's counters."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import typer

from tilewright_tools.cli.console.output import examples, out, print_json, table
from tilewright_tools.cli.service.counters import server_statistics

__all__ = ["TOP_EPILOG", "Row", "rows_between", "top"]

TOP_EPILOG = examples("tilewright top", "tilewright top --once --interval 5", "tilewright top --json | jq .kernels")
_COLUMNS = ("kernel", "device", "by", "launches/s", "us", "busy")


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one device, launched by the server or by its clients."""

    kernel: str
    device: str
    by: str
    """``server`` or ``caller``."""
    launches: int
    per_second: float
    us: float | None
    """Mean time of a launch; ``None`` if none was timed. Callers time at most one launch in a thousand."""
    busy: float | None
    """Share of the time that the device spends with it."""


def rows_between(before: Any, after: Any, seconds: float) -> list[Row]:
    """Kernels that were launched between two replies, those that take most of the time first, then by launches."""
    known = {(item.name, item.device): item for item in before.kernels} if before is not None else {}
    rows: list[Row] = []
    for item in after.kernels:
        old = known.get((item.name, item.device))

        def new(name: str, item: Any = item, old: Any = old) -> int:
            return int(getattr(item, name) - (getattr(old, name) if old is not None else 0))

        for by, launches, timed, total, always in (
            ("server", new("launches"), new("launches"), new("device_ns"), item.device_ns / max(item.launches, 1)),
            (
                "caller",
                new("caller_launches"),
                new("caller_samples"),
                new("caller_sampled_ns"),
                item.caller_sampled_ns / max(item.caller_samples, 1),
            ),
        ):
            if launches <= 0:
                continue
            mean_ns = total / timed if timed > 0 else always  # samples are rare: an older one is better than none
            us = mean_ns / 1e3 if mean_ns > 0 else None
            busy = None if us is None else us * launches / seconds / 1e6
            rows.append(Row(item.name, item.device, by, launches, launches / seconds, us, busy))
    rows.sort(key=lambda row: (-(row.busy or 0.0), -row.launches, row.kernel, row.device, row.by))
    return rows


def top(
    target: str = typer.Option("", "--target", help="Server. Default: your own."),
    interval: float = typer.Option(2.0, "--interval", "-i", min=0.05, help="Seconds between two looks."),
    once: bool = typer.Option(False, "--once", help="Print one interval and end. So does --json, and a pipe."),
    lines: int = typer.Option(20, "--lines", "-n", min=1, help="Kernels that are shown."),
    timeout: float = typer.Option(2.0, "--timeout", min=0.01, help="Seconds to wait for an answer."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show live which kernels run on which device, launched by the server or by clients in their own processes, how
    often and how fast. Ends with Ctrl-C.
    """
    where, before = server_statistics(target, timeout)
    begun = time.monotonic()
    live = sys.stdout.isatty() and not once and not as_json
    try:
        while True:
            time.sleep(interval)
            _, after = server_statistics(where, timeout)
            now = time.monotonic()
            rows = rows_between(before, after, now - begun)
            if as_json:
                print_json({"target": where, "seconds": now - begun, "kernels": [asdict(row) for row in rows]})
                return
            _show(where, after, rows, lines, live=live)
            if not live:
                return
            before, begun = after, now
    except KeyboardInterrupt:
        return


def _show(where: str, reply: Any, rows: list[Row], lines: int, *, live: bool) -> None:
    if live:
        out().clear()
    if sys.stdout.isatty():
        each: dict[str, float] = {}
        for row in rows:
            each[row.by] = each.get(row.by, 0.0) + row.per_second
        out().print(
            f"{where}: {reply.sessions} sessions, {each.get('server', 0):.0f} launches/s by the server, "
            f"{each.get('caller', 0):.0f} by clients, {reply.queue_depth} waiting",
            markup=False,
        )
    cells = [
        (
            row.kernel,
            row.device,
            row.by,
            f"{row.per_second:.1f}",
            "" if row.us is None else f"{row.us:.1f}",
            "" if row.busy is None else f"{row.busy:.0%}",
        )
        for row in rows[:lines]
    ]
    table("", _COLUMNS, cells, right=("launches/s", "us", "busy"))
    if sys.stdout.isatty() and len(rows) > lines:
        out().print(f"and {len(rows) - lines} more", markup=False)

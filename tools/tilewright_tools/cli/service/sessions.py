"""`tilewright sessions`: who is connected to a server, and what each session holds."""

from __future__ import annotations

import sys
import time
from typing import Any

import typer

from tilewright_tools.cli.console.output import examples, out, print_json, table
from tilewright_tools.cli.service.counters import sessions_of

__all__ = ["EPILOG", "sessions"]

EPILOG = examples(
    "tilewright sessions", "tilewright sessions --watch 2", "tilewright sessions --json | jq '.[].process'"
)
_NUMBERS = (
    "age_ns", "regions", "region_bytes", "buffers", "buffer_bytes", "plans", "bindings", "attached_connections",
    "calls_waiting", "calls_running",
)  # fmt: skip
_TEXTS = ("principal", "process", "client_name", "priority")


def sessions(
    target: str = typer.Option("", "--target", help="Server. Default: your own."),
    watch: float = typer.Option(
        0.0, "--watch", "-w", min=0.0, help="Seconds after which to look again. Ends by Ctrl-C."
    ),
    timeout: float = typer.Option(2.0, "--timeout", min=0.01, help="Seconds to wait for an answer."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List a server's sessions: whose they are, what they hold, and which of their calls wait. For the server's own
    user, and for who has the role administer.
    """
    live = watch > 0 and sys.stdout.isatty() and not as_json
    try:
        while True:
            where, reply = sessions_of(target, timeout)
            # The command's own session ends with it.
            others = [item for item in reply.sessions if not item.own]
            if as_json:
                print_json([{name: getattr(item, name) for name in (*_TEXTS, *_NUMBERS)} for item in others])
                return
            if live:
                out().clear()
            _show(where, others, reply.total - 1)
            if not live:
                return
            time.sleep(watch)
    except KeyboardInterrupt:
        return


def _show(where: str, found: list[Any], total: int) -> None:
    rows = [
        (
            item.principal,
            item.process.partition("@")[0],
            item.client_name,
            item.priority,
            f"{item.age_ns / 1e9:.0f}",
            f"{item.regions} ({item.region_bytes / 2**20:.1f} MiB)",
            f"{item.buffers} ({item.buffer_bytes / 2**20:.1f} MiB)",
            item.plans,
            item.bindings,
            f"{item.calls_waiting}+{item.calls_running}",
        )
        for item in found
    ]
    columns = ("user", "process", "name", "priority", "age s", "regions", "buffers", "plans", "bindings", "calls")
    table("", columns, rows, right=columns[4:], spare=("bindings", "plans", "buffers", "priority", "name"))
    if sys.stdout.isatty():
        more = f", the first {len(found)} shown" if total > len(found) else ""
        out().print(f"{where}: {total} sessions{more}; calls: waiting + served", markup=False)

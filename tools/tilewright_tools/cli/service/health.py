"""`tilewright health` and `tilewright status`: a running server, asked from outside, without a session."""

from __future__ import annotations

from typing import Any

import typer

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.output import examples, note, out, print_json, table
from tilewright_tools.cli.private_server import health_of
from tilewright_tools.cli.service.counters import server_statistics, target_of

__all__ = ["HEALTH_EPILOG", "STATUS_EPILOG", "health", "status"]

HEALTH_EPILOG = examples(
    "tilewright health", "tilewright health --ready --target unix:/run/tilewright/tilewright.sock --quiet"
)
STATUS_EPILOG = examples("tilewright status", "tilewright status --json | jq .operations")
_TARGET = typer.Option("", "--target", help="Server. Default: your own.")
_TIMEOUT = typer.Option(2.0, "--timeout", min=0.01, help="Seconds to wait for the answer.")


def health(
    target: str = _TARGET,
    ready: bool = typer.Option(False, "--ready", help="Ask whether clients should be sent there."),
    timeout: float = _TIMEOUT,
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print nothing; the exit code is the answer."),
) -> None:
    """Ask a server for its health: exit code 0 if it is well, 1 if it says that it is not (it starts or drains), 3 if
    none answers.
    """
    where = target_of(target)
    answer = health_of(where, "tilewright.ready" if ready else "", timeout)
    if not quiet:
        out().print(f"{where}: {answer or 'no answer'}", markup=False)
    if answer != "serving":
        raise typer.Exit(Exit.FAILED if answer else Exit.UNAVAILABLE)


def status(
    target: str = _TARGET, timeout: float = _TIMEOUT, as_json: bool = typer.Option(False, "--json", help="Print JSON.")
) -> None:
    """Show what a running server does: holdings of its clients, operations with their times, devices, plugins."""
    where, reply = server_statistics(target, timeout)
    ready = health_of(where, "tilewright.ready", timeout)
    if as_json:
        print_json({"target": where, "ready": ready == "serving", **_record(reply)})
        return
    state = "ready" if ready == "serving" else "not ready"
    out().print(f"{where}: {state}, up for {reply.uptime_ns / 1e9:.0f} s", markup=False)
    held = (
        ("sessions", reply.sessions),
        ("regions", f"{reply.regions} ({reply.region_bytes / 2**20:.1f} MiB)"),
        ("buffers", f"{reply.buffers} ({reply.buffer_bytes / 2**20:.1f} MiB)"),
        ("bindings", reply.bindings),
        ("attached connections", reply.attached_connections),
        ("waiting for devices", reply.queue_depth),
        ("kernels found, compiled, failed", _kernels(reply)),
    )
    table("", ("what", "now"), held)
    if reply.operations:
        rows = [
            (
                item.name,
                item.success,
                item.failure,
                f"{item.plan_hits}/{item.plan_hits + item.plan_misses}",
                f"{item.cumulative.device_ns / 1e9:.3f}",
                f"{item.cumulative.queue_ns / 1e9:.3f}",
            )
            for item in reply.operations
        ]
        columns = ("operation", "done", "failed", "plans remembered", "device s", "queue s")
        table("", columns, rows, right=columns[1:])
    for item in reply.plugins:
        if not item.loaded:
            note(f"plugin {item.name} does not work: {item.reason}")


def _record(message: Any) -> dict[str, Any]:
    """A message with all of its fields, numbers as numbers."""
    found: dict[str, Any] = {}
    for item in message.DESCRIPTOR.fields:
        value = getattr(message, item.name)
        if item.message_type is None:
            found[item.name] = list(value) if item.is_repeated else value
        else:
            found[item.name] = [_record(part) for part in value] if item.is_repeated else _record(value)
    return found


def _kernels(reply: Any) -> str:
    return f"{reply.artifact_hits}, {reply.artifact_builds}, {reply.artifact_failures}"

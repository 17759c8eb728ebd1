"""`tilewright stop`: end the user's own server."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time

import typer

from tilewright_tools.cli.console.output import examples, note, working

__all__ = ["EPILOG", "stop"]

EPILOG = examples("tilewright stop", "tilewright stop --target unix:/tmp/tw.sock")
_CREDENTIALS = struct.Struct("3i")
_POLL_S = 0.05


def stop(
    target: str = typer.Option("", help="Server, by its Unix socket. Default: your own."),
    timeout: float = typer.Option(30.0, min=0, help="Seconds to wait for its end."),
) -> None:
    """End your server as SIGTERM does: what runs is finished, new work is refused. Exit code 3 if none runs.

    It is the server that `tilewright serve` or a program's `tilewright.connect()` started.
    """
    from tilewright.session.settings import default_target, normalise_target
    from tilewright_kit.types.errors import InvalidArgumentError, UnavailableError
    from tilewright_tools.cli.private_server import is_listening

    place = normalise_target(target) if target else default_target()
    if not place.startswith("unix:"):
        raise InvalidArgumentError(
            "a server behind TCP cannot be told from here to end",
            field="target",
            value=place,
            rule="stop_target",
            fix="name its Unix socket, or end it where it runs",
        )
    if not is_listening(place):
        raise UnavailableError("no server runs there", field="target", value=place, rule="server_running")
    pid = _owner(place.removeprefix("unix:"))
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    with working(f"waiting for the end of process {pid}"):
        while is_listening(place) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    if is_listening(place):
        raise UnavailableError(
            f"process {pid} was told to end and has not",
            field="timeout",
            value=timeout,
            rule="stop_timeout",
            fix="allow more time; a second `tilewright stop` ends it at once",
        )
    note(f"process {pid} has ended")


def _owner(path: str) -> int:
    """The process that listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid

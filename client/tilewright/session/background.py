"""The user's own server, started in the background by the first program that needs it."""

from __future__ import annotations

import contextlib
import importlib.util
import select
import socket
import subprocess
import sys
from pathlib import Path

from tilewright.session import settings

__all__ = ["ensure_server"]

IDLE_S = 900
"""Seconds without a client after which a server that was started so ends."""
START_S = 60.0
"""Longest wait for it: the first start on a machine compiles the CPU's runtime."""
_NEEDED = ("tilewright_tools", "tilewright_server", "typer", "pluggy", "platformdirs", "grpc_health")
# A process in between leaves the server to the system, so that nobody has to wait for its end.
_LAUNCH = """
import subprocess, sys
with open(sys.argv[1], "ab") as log:
    subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stderr=log, start_new_session=True, cwd="/")
"""


def ensure_server(target: str) -> bool:
    """Start a server at the user's default socket, and wait until it is ready; true if it was started here.

    Nothing happens if something listens there, or the server is not installed. It ends when it has had no client for
    a quarter of an hour. Of several programs that start one at once the first one's stays.
    """
    if not target.startswith("unix:") or _listening(target) or not all(map(importlib.util.find_spec, _NEEDED)):
        return False
    serve = [sys.executable, "-m", "tilewright_tools.cli", "serve", "--idle-exit-s", str(IDLE_S)]
    command = [sys.executable, "-c", _LAUNCH, _log_file(), *serve]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as start:
        assert start.stdout is not None
        ready, _, _ = select.select([start.stdout], [], [], START_S)
        is_ready = bool(ready) and start.stdout.readline().startswith(b"ready")
    if is_ready:
        sys.stderr.write(
            f"tilewright: started your server in the background; it ends after {IDLE_S // 60} minutes without a client,"
            " or by `tilewright stop`\n"
        )
        return True
    return False  # another program's is there by now, or the connection says that there is none


def _listening(target: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(target.removeprefix("unix:"))
        except OSError:
            return False
    return True


def _log_file() -> str:
    """File of the server's log; of what it says nothing is kept where there can be none."""
    path: Path = settings.state_dir() / "server.log"
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        return str(path)
    return "/dev/null"

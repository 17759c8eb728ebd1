"""NVIDIA's Multi-Process Service: its control daemon, whoever started it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tilewright_server.devices.cuda.settings import mps_environment, mps_folder

__all__ = ["CONTROL", "COST", "INSTALL", "Daemon", "ask", "describe", "find_daemon"]

CONTROL = "nvidia-cuda-mps-control"
INSTALL = f"install NVIDIA's Multi-Process Service ({CONTROL}; with the driver, or the package nvidia-compute-utils)"
COST = "kernels of the server and of its clients take turns, and each turn costs about 0.3 ms"
_ASK_S = 5.0
"""How long the daemon may take to answer; it does in milliseconds."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """Answer of a search. ``folder`` is that of its pipes; None if none runs for this user."""

    folder: Path | None
    problem: str = ""


def ask(folder: Path, command: str, timeout: float = _ASK_S) -> bool:
    """True if the daemon of a folder has taken a command. False without the program."""
    program = shutil.which(CONTROL)
    if program is None:
        return False
    try:
        done = subprocess.run(
            [program],
            input=f"{command}\n".encode(),
            env=mps_environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def find_daemon() -> Daemon:
    """The daemon that CUDA in this environment would use, if it runs for this user."""
    if shutil.which(CONTROL) is None:
        return Daemon(None, f"{CONTROL} is not installed")
    folder = mps_folder()
    try:
        owner = folder.stat().st_uid
    except OSError:
        return Daemon(None, "no daemon runs")
    if owner not in (os.getuid(), 0):
        return Daemon(None, f"the folder {folder} is another user's")
    return Daemon(folder) if ask(folder, "get_server_list") else Daemon(None, "no daemon runs")


def describe() -> str:
    """State for people: what runs, or what its absence costs and what mends it."""
    found = find_daemon()
    if found.folder is not None:
        return f"a daemon runs, with its pipes in {found.folder}"
    installed = shutil.which(CONTROL) is not None
    fix = "tilewright serve --mps auto" if installed else f"{INSTALL}, and start the server with --mps auto"
    return f"{found.problem}: {COST}; launches in place of a single process do not. Fix: {fix}"

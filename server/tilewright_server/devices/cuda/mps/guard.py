"""A process that runs a daemon of the Multi-Process Service for a server, and ends it with the server.

    python -m tilewright_server.devices.cuda.mps.guard FOLDER

Starts ``nvidia-cuda-mps-control -d`` with pipes and logs in FOLDER, says ``ready`` or ``error: REASON`` on its standard
output, and waits for the end of its standard input, whose other end the server holds: it comes however the server
ends. Then the daemon is told to quit. It takes no new processes from then on, and ends when those that use the GPU
through it have ended: nobody's kernels are cut off. The folder goes with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tilewright_server.devices.cuda.mps.daemon import CONTROL, ask
from tilewright_server.devices.cuda.settings import mps_environment

__all__ = ["main"]

_START_S = 15.0
_QUIT_S = 60.0
"""How long one command to quit may wait for those that use the GPU, before it is given again."""
_POLL_S = 0.1


def main() -> int:
    """Exit status 1 if the daemon does not start."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server's end is what ends it
    folder = Path(sys.argv[1])
    problem = _start(folder)
    sys.stdout.write(f"error: {problem}\n" if problem else "ready\n")
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever reads the server's output is not kept waiting
    if not problem:
        while os.read(0, 4096):
            pass
        _quit(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if problem else 0


def _start(folder: Path) -> str:
    """Start the daemon; why that failed, or nothing."""
    pipe, log = folder / "pipe", folder / "log"
    try:
        for made in (folder, pipe, log):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        done = subprocess.run(
            [CONTROL, "-d"],
            env=mps_environment(pipe, log),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_START_S,
            check=False,
        )
    except FileNotFoundError:
        return f"{CONTROL} is not installed"
    except OSError as error:
        return f"{CONTROL} cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{CONTROL} -d does not return"
    if done.returncode:
        return f"{CONTROL} -d ended with status {done.returncode}: {_last_line(log / 'control.log')}"
    deadline = time.monotonic() + _START_S
    while not ask(pipe, "get_server_list"):
        if time.monotonic() > deadline:
            return f"the daemon does not answer: {_last_line(log / 'control.log')}"
        time.sleep(_POLL_S)
    return ""


def _quit(folder: Path) -> None:
    pipe = folder / "pipe"
    while ask(pipe, "get_server_list"):
        ask(pipe, "quit", _QUIT_S)
        time.sleep(_POLL_S)


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text("utf-8", "replace").splitlines()
        return lines[-1] if lines else "its log is empty"
    return "it wrote no log"


if __name__ == "__main__":
    sys.exit(main())

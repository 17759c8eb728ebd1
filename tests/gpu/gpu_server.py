"""A server process on the GPU, and the means to look at it from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tilewright_tools.cli.private_server import PrivateServer

DEVICE = "cuda:0"


class CudaServer:
    """A server process whose default device is the GPU, and the means to look at it from outside."""

    def __init__(self, flags: tuple[str, ...] = ()) -> None:
        self.private = PrivateServer(("--device", DEVICE, *flags), timeout=60.0)
        self.target = ""

    def __enter__(self) -> CudaServer:
        self.target = self.private.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.private.__exit__()

    def workers(self) -> list[int]:
        """Process ids of the server's device workers."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    status = (entry / "stat").read_text().rpartition(")")[2].split()
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if int(status[1]) == self.private.pid and b"devices.worker" in command:
                    found.append(int(entry.name))
        return found


def eventually(condition: Callable[[], bool], seconds: float = 2.0) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()

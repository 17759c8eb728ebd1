"""Stands for ``nvidia-cuda-mps-control`` where there is none: a daemon that answers commands at a socket in the folder
of its pipes. It quits once no file ``client`` lies there, as the real one waits for those that use the GPU.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

PIPE = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
BROKEN = os.environ.get("FAKE_MPS_BROKEN", "")


def serve(server: socket.socket) -> None:
    quitting = False
    server.settimeout(0.05)
    while not (quitting and not (PIPE / "client").exists()):
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        with connection:
            quitting |= connection.recv(100).strip().startswith(b"quit")
            connection.send(b"done")
    (PIPE / "control").unlink()


def start() -> int:
    if BROKEN:
        (Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]) / "control.log").write_text(f"first\n{BROKEN}\n")
        return 1
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(PIPE / "control"))
    server.listen()
    if os.fork():
        return 0
    os.setsid()
    if os.fork():
        os._exit(0)
    (PIPE / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    for fd in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    serve(server)
    os._exit(0)


def ask() -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(PIPE / "control"))
        except OSError:
            sys.stdout.write(f"Cannot find MPS control daemon process {time.time()}\n")
            return 1
        connection.send(sys.stdin.buffer.read())
        connection.recv(100)
    return 0


if __name__ == "__main__":
    sys.exit(start() if sys.argv[1:] == ["-d"] else ask())

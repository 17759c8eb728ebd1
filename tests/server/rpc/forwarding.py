"""Connections to a server from processes of other users."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rpc_harness import ServerProcess

STRANGER = 54321
FORWARDER = """
import os, socket, sys, threading
def pass_on(one, other):
    try:
        while part := one.recv(1 << 16):
            other.sendall(part)
    except OSError:
        pass
    finally:
        other.close()
os.setuid(int(sys.argv[3]))
door = socket.socket(socket.AF_UNIX)
door.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
door.listen()
print("ready", flush=True)
while True:
    here, _ = door.accept()
    there = socket.socket(socket.AF_UNIX)
    there.connect(sys.argv[2])
    for pair in ((here, there), (there, here)):
        threading.Thread(target=pass_on, args=pair, daemon=True).start()
"""
"""A process of a user that connects to the server for whoever connects to it, and passes on all bytes."""


@contextlib.contextmanager
def folder_for_all() -> Iterator[Path]:
    """A folder that all users reach."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        open_to_all = folder / "doors"
        open_to_all.mkdir()
        open_to_all.chmod(0o1777)
        yield folder


@contextlib.contextmanager
def forwarded(server: ServerProcess, place: Path, user: int) -> Iterator[tuple[str, int]]:
    """The address and the process number of a way to ``server`` through a process of ``user``."""
    if user != os.geteuid() and os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    door = place / "doors" / f"{user}"
    command = [sys.executable, "-I", "-S", "-c", FORWARDER, str(door), str(server.socket), str(user)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield f"unix:{door}", process.pid
        finally:
            process.kill()

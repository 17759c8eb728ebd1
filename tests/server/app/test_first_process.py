"""A server that is the first process of a container, in a namespace of process ids of the test's own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SERVER = """
import os, signal, sys, time
from tilewright_server.hosting.lifecycle.first_process import below_first_process

def serve():
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    # A process whose parent ends before it does: nobody waits for it but the first process.
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        orphan = os.fork()
        if orphan == 0:
            os.close(reader), os.close(writer)
            time.sleep(0.05)
        else:
            os.write(writer, str(orphan).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    orphan = int(os.read(reader, 20))
    while True:
        try:
            os.kill(orphan, 0)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    print("ready", os.getpid() > 1, os.getppid(), flush=True)
    while not stopped:
        time.sleep(0.01)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return 7

sys.exit(below_first_process(serve))
"""


@pytest.mark.parametrize(("end", "status"), [("ended", 7), ("killed", 128 + signal.SIGKILL)])
def test_the_first_process_ends_orphans_passes_signals_on_and_has_the_servers_status(end: str, status: int) -> None:
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs unshare, and the right to make namespaces of process ids (root)")
    command = [*unshare, sys.executable, "-c", SERVER, end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().split() == ["ready", "True", "1"]
            (first,) = children(process.pid)
            os.kill(first, signal.SIGTERM)
            assert process.wait(60) == status
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := [int(item) for item in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]:
            return found
    raise AssertionError(f"{pid} has no child")

"""The Multi-Process Service with a GPU: the server's own daemon, processes of clients that join it, and both ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright_server.devices.cuda.mps.daemon import CONTROL, ask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"{CONTROL} is not installed"),
    pytest.mark.skipif("CUDA_MPS_PIPE_DIRECTORY" in os.environ, reason="these tests run under a daemon already"),
]
CLIENT = """
import os, sys
import tilewright as tw
client = tw.connect(sys.argv[1], launch="server")
import torch
a = torch.arange(64 * 64, device="cuda", dtype=torch.float32).reshape(64, 64) / 4096
out = client.gemm(a, a)
torch.cuda.synchronize()
assert torch.allclose(out, a @ a, rtol=1e-2, atol=1e-2), (out - a @ a).abs().max()
print(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""), client.report.placement)
"""
LATE = """
import sys, warnings
import torch
torch.zeros(1, device="cuda")
import tilewright as tw
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for _ in range(2):
        tw.connect(sys.argv[1]).close()
print(sum("Multi-Process Service" in str(item.message) for item in found))
"""
BYSTANDER = """
import sys
import tilewright as tw
client = tw.connect(sys.argv[1], launch="caller")
import torch
a = torch.eye(64, device="cuda")
assert torch.equal(client.gemm(a, a), a)
print("ready", flush=True)
sys.stdin.readline()
try:
    for _ in range(100):
        client.gemm(a, a)
        torch.cuda.synchronize()
    print("whole")
except (RuntimeError, tw.TilewrightError) as error:
    print("lost")
"""
FAULTY = """
import sys
import tilewright as tw
client = tw.connect(sys.argv[1], launch="caller")
import torch
a, out = torch.eye(64, device="cuda"), torch.empty(64, 64, device="cuda")
client.gemm(a, a, out=out)
plan = client.plan_gemm(a, a, out=out)
assert plan(a, a, out=out) is out
opened = plan._state.here.plan
opened.run(opened.pack(a.data_ptr(), a.data_ptr(), 1 << 44), torch.cuda.current_stream().cuda_stream)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("fault" if "illegal" in str(error) or "launch failure" in str(error) else error)
"""


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A runtime folder of a short name: pipes are sockets, whose paths have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="tw-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def server(runtime: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    target = f"unix:{runtime}/s"
    env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    command = [sys.executable, "-m", "tilewright_tools.cli", "serve", "--listen", target, "--mps", "require"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready"), "see the log above"
        yield process, target
        process.kill()


def said_by(script: str, target: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script, target], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_clients_run_beside_the_server_and_the_daemon_ends_with_it(server: Any, runtime: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    process, target = server
    (folder,) = (runtime / "tilewright").glob("mps-*")
    pipe = folder / "pipe"
    assert ask(pipe, "get_server_list")
    assert said_by(CLIENT, target) == [str(pipe), "server"]
    assert said_by(LATE, target) == ["1"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists()
    assert not ask(pipe, "get_server_list")


def test_a_fault_takes_those_who_share_the_gpu_and_new_processes_are_served(server: Any) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    process, target = server
    assert said_by(CLIENT, target)[1] == "server"
    command = [sys.executable, "-c", BYSTANDER, target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bystander:
        assert bystander.stdout is not None
        assert bystander.stdout.readline() == "ready\n"
        assert said_by(FAULTY, target) == ["fault"]
        assert bystander.communicate("\n", timeout=90)[0] == "lost\n"
    deadline = time.monotonic() + 90
    while True:
        done = subprocess.run([sys.executable, "-c", CLIENT, target], capture_output=True, text=True, timeout=90)
        if done.returncode == 0 or time.monotonic() > deadline:
            break
    assert done.returncode == 0, done.stderr
    assert process.poll() is None

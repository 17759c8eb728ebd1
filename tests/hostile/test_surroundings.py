"""Surroundings that are hostile, or short of something: the folder of the cache, the disk of the log, descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from hostile_servers import GEMM, LIMITED, STRANGER, bystander_lives, healthy
from rpc_harness import FAKE, Client, ServerProcess, eventually, inline

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import tensor_pb2 as tp

TO_FULL = "import os, sys; os.dup2(os.open('/dev/full', 1), 2); os.execv(sys.argv[1], sys.argv[1:])"


def multiplies(address: str, side: int = 8) -> None:
    """A product of the real engine, whose kernel may have to be built."""
    a = np.arange(side * side, dtype=np.float32).reshape(side, side)
    spec = tp.TensorSpec(dtype=tp.FP32, shape=[side, side])
    inputs = [tp.Operand(name=name, spec=spec, location=inline(a.tobytes())) for name in "ab"]
    with Client(address) as client:
        request = dp.RunRequest(session=client.token, operation="gemm", inputs=inputs)
        reply = client.dispatch.Run(request, timeout=120)
    np.testing.assert_array_equal(np.frombuffer(reply.outputs[0].inline, np.float32).reshape(side, side), a @ a)


def links(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir(mode=0o700)
    (outside / "theirs").write_text("not the cache's")
    for name in ("objects", "staging", "locks", "plans", "quarantine", "measurements.db"):
        (folder / name).symlink_to(outside, target_is_directory=True)


def loops(folder: Path) -> None:
    for name in ("objects", "staging", "locks", "plans", "quarantine", "measurements.db"):
        (folder / name).symlink_to(name)


def pipes(folder: Path) -> None:
    for name in ("objects", "staging", "locks", "plans", "quarantine", "measurements.db", "version"):
        os.mkfifo(folder / name)


def huge(folder: Path) -> None:
    for name in ("measurements.db", "plans", "version", "index", "objects"):
        with (folder / name).open("wb") as file:
            file.truncate(1 << 40)


def strangers(folder: Path) -> None:
    for name in ("objects", "staging", "plans"):
        (folder / name).mkdir()
        os.chown(folder / name, STRANGER, STRANGER)


CACHES = {"links": links, "loops": loops, "pipes": pipes, "huge": huge, "strangers": strangers}


@pytest.mark.extended
@pytest.mark.parametrize("spoil", CACHES.values(), ids=CACHES)
def test_a_folder_of_the_cache_that_was_spoilt_holds_up_nobody(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """It works beside what it finds, or says what it is and ends; what links lead to stays as it was."""
    if spoil is strangers and os.geteuid():
        pytest.skip("only root gives files to others")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    spoil(cache)
    with ServerProcess(tmp_path, GEMM, cpu_threads=1) as server:
        if server.alive:
            assert healthy(server.addresses[0])
            multiplies(server.addresses[0])
            assert server.stop() == 0
        else:
            assert "fix" in server.log().lower(), server.log()
    assert "Traceback" not in server.log(), server.log()
    if spoil is links:
        assert (tmp_path / "outside" / "theirs").read_text() == "not the cache's"


@pytest.mark.extended
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files to others")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    os.chown(cache, STRANGER, STRANGER)
    with ServerProcess(tmp_path, GEMM) as server:
        assert not server.alive
        assert "cache" in server.log() and "Traceback" not in server.log()


def test_a_log_and_an_audit_log_on_a_full_disk_hold_up_nobody(tmp_path: Path) -> None:
    to_full = [
        sys.executable,
        "-c",
        "import os, sys; os.dup2(os.open('/dev/full', 1), 2); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    with ServerProcess(tmp_path, [*to_full, *FAKE], audit_log="/dev/full", log_level="debug") as server:
        for _ in range(20):
            bystander_lives(server.addresses[0])
        assert server.stop() == 0


def is_let_in(address: str) -> bool:
    try:
        return healthy(address)
    except grpc.RpcError:
        return False


@pytest.mark.extended
@pytest.mark.parametrize("descriptors", [24, 48, 64, 100])
def test_few_descriptors_are_enough_or_refused_with_a_reason(tmp_path: Path, descriptors: int) -> None:
    command = [sys.executable, "-c", LIMITED, "RLIMIT_NOFILE", str(descriptors), *FAKE]
    with ServerProcess(tmp_path, command) as server:
        if not server.alive:
            assert descriptors < 64, server.log()
            assert "descriptor" in server.log().lower() or "open files" in server.log().lower(), server.log()
            return
        address = server.addresses[0]
        bystander_lives(address)
        words = [sys.executable, "-c", SILENT, address.removeprefix("unix:"), str(2 * descriptors)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "opened\n"
            process.kill()
        # What is gone gives its descriptors back; whoever comes before is sent away.
        assert eventually(lambda: is_let_in(address))
        bystander_lives(address)
        assert server.alive


SILENT = """
import socket, sys
held = []
for _ in range(int(sys.argv[2])):
    way = socket.socket(socket.AF_UNIX)
    way.settimeout(0.05)
    held.append(way)
    try:
        way.connect(sys.argv[1])
    except OSError:
        pass
print("opened", flush=True)
sys.stdin.read()
"""

"""Shared memory by name, for languages that pass no descriptors: nothing is left of it when its client is killed."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from rpc_harness import Client, ServerProcess, eventually, refused

from tilewright_proto.v1 import memory_pb2 as mp

NAMED = """
import mmap, os, signal, sys
import grpc
from tilewright_proto.v1 import memory_pb2 as mp, memory_pb2_grpc

name = sys.argv[2]
with open("/dev/shm/" + name, "w+b") as file:
    file.write(bytes(8192))
    file.flush()
    memory = mmap.mmap(file.fileno(), 8192)
stub = memory_pb2_grpc.MemoryStub(grpc.insecure_channel(sys.argv[1]))
lease = stub.OpenSession(mp.OpenSessionRequest(), wait_for_ready=True)
token = next(lease).opened.session
source = mp.PosixSource(name="/" + name, unlink=True)
stub.RegisterRegion(mp.RegisterRegionRequest(session=token, posix=source, bytes=8192))
memory[0] = 1
print("registered", os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("apart", [False, True], ids=["one PID namespace", "two PID namespaces"])
def test_memory_by_name_is_gone_with_a_killed_client(server: ServerProcess, apart: bool) -> None:
    name = "tilewright-" + secrets.token_hex(16)
    before = server.regions()
    command = [sys.executable, "-c", NAMED, server.addresses[0], name]
    if apart:
        # Killed with its first process, the namespace takes all in it along.
        command = ["unshare", "--pid", "--fork", "--kill-child", *command]
        if subprocess.run([*command[:4], "true"], capture_output=True, check=False).returncode:
            pytest.skip("this user may not make PID namespaces (unshare --pid)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        assert said[0] == "registered" and (said[1] == "1") is apart
        assert server.regions() != before
        assert not (Path("/dev/shm") / name).exists(), "the name goes with the registration"
        process.kill()
    assert eventually(lambda: server.regions() == before)


def test_a_name_that_is_refused_stays(client: Client) -> None:
    name = "tilewright-" + secrets.token_hex(16)
    path = Path("/dev/shm") / name
    path.write_bytes(bytes(4096))
    try:
        source = mp.PosixSource(name="/" + name, unlink=True)
        with refused("invalid_argument", "region_size"):
            client.memory.RegisterRegion(mp.RegisterRegionRequest(session=client.token, posix=source, bytes=8192))
        assert path.exists()
    finally:
        path.unlink()

"""Time until a server has freed the regions of a client that was killed.

    python bench/clients/killed_client.py [--regions 100] [--kills 20]

Each client shares that many memory files of 64 KiB and is killed; the server's table of mappings and descriptors is
read until none is left. Prints milliseconds from the signal on.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

from serving import serving

CLIENT = """
import fcntl, os, secrets, sys
import grpc
from tilewright_proto.v1 import memory_pb2, memory_pb2_grpc

memory = memory_pb2_grpc.MemoryStub(grpc.insecure_channel(sys.argv[1]))
lease = memory.OpenSession(memory_pb2.OpenSessionRequest(client_name="killed"), wait_for_ready=True)
token = next(lease).opened.session
for _ in range(int(sys.argv[2])):
    name = "tilewright-" + secrets.token_hex(16)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(65536))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK)
    source = memory_pb2.MemfdSource(pid=os.getpid(), fd=fd, name=name)
    memory.RegisterRegion(memory_pb2.RegisterRegionRequest(session=token, memfd=source, bytes=65536))
print("ready", flush=True)
sys.stdin.read()
"""
NAME = "/memfd:tilewright-"


def server_of(target: str) -> int:
    """Id of the process that listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(target.removeprefix("unix:"))
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def mapped(pid: int) -> int:
    """Memory files of clients that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count(NAME)


def opened(pid: int) -> int:
    """Those that it has open."""
    count = 0
    for item in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += NAME in str(item.readlink())
    return count


def freed_ms(target: str, server: int, regions: int) -> float:
    command = [sys.executable, "-c", CLIENT, target, str(regions)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        if not client.stdout.readline():
            raise SystemExit("the client could not share its memory")
        if mapped(server) + opened(server) < regions:
            raise SystemExit("the server does not hold the regions")
        begin = time.perf_counter()
        client.kill()
        while mapped(server):
            time.sleep(0)
        while opened(server):
            time.sleep(0)
        return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--regions", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    chosen = parser.parse_args()
    with serving() as target:
        server = server_of(target)
        taken = sorted(freed_ms(target, server, chosen.regions) for _ in range(chosen.kills))
    print(f"{chosen.regions} regions freed: least {taken[0]:.1f} ms, median {statistics.median(taken):.1f}", end="")
    print(f", most {taken[-1]:.1f} ({chosen.kills} kills)")


if __name__ == "__main__":
    main()

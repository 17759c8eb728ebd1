"""Servers that are attacked, under limits of the system, and a bystander that must not notice."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rpc_harness import FAKE, Client, MemoryFile, ServerProcess, floats, inline

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

STRANGER = 54321
"""A user without any other process: the limit of threads counts all of a user, and does not hold for root."""
RUN = "/tilewright.v1.Dispatch/Run"
WAIT_S = 20.0
PAGE = 4096
WINDOW = [("grpc.http2.lookahead_bytes", 64 * 1024), ("grpc.http2.bdp_probe", 0)]
GEMM = [sys.executable, str(Path(__file__).parents[1] / "server" / "app" / "operation_server.py"), "gemm"]


_AS_STRANGER = f"""
import ctypes, os, resource, sys
limit = int(sys.argv[1])
if os.geteuid() == 0:
    os.setresuid({STRANGER}, 0, 0)  # files are still ours, threads are counted as the stranger's
    for capability in (21, 24):  # SYS_ADMIN, SYS_RESOURCE: who has one may start as many as he likes
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
os.execv(sys.argv[2], sys.argv[2:])
"""


LIMITED = (
    "import os, resource, sys; n = int(sys.argv[2]); resource.setrlimit(getattr(resource, sys.argv[1]), (n, n)); "
    + ("os.execv(sys.argv[3], sys.argv[3:])")
)
"""A process under a limit of the system, which is named."""


@contextlib.contextmanager
def limited_group(controller: str, limit: str, value: int) -> Iterator[list[str]]:
    """The beginning of a command that runs in a group of its own, as in a container, where the file ``limit`` of a
    controller says ``value``. Skips where no group can be made."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    parent = Path("/sys/fs/cgroup", *([controller] if controller in own else []))
    group = Path(f"{parent}{own.get(controller, own.get('', '/'))}", f"tilewright-test-{os.getpid()}")
    if controller == "memory" and controller in own:
        limit = "memory.limit_in_bytes"  # as it was called before version 2 of groups
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error.strerror}")
    try:
        try:
            (group / limit).write_text(str(value))
        except OSError as error:
            pytest.skip(f"control groups have no {limit} here: {error.strerror}")
        yield ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"]
    finally:
        until = time.monotonic() + WAIT_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.02)
        group.rmdir()


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def threads_of_user() -> int:
    """Threads that count beside a server's under its limit."""
    if os.geteuid() == 0:
        return 0
    mine = (item for item in Path("/proc").iterdir() if item.name.isdigit())
    return sum(threads_of(int(item.name)) for item in mine if item.exists() and item.stat().st_uid == os.geteuid())


def start_with_few_threads(folder: Path, spare: int, **settings: Any) -> ServerProcess:
    """A server of the fake engine that may start ``spare`` more threads than it has after the first calls."""
    (folder / "first").mkdir()
    with ServerProcess(folder / "first", **settings) as first:
        bystander_lives(first.addresses[0])
        limit = threads_of(first.pid) + spare
    command = [sys.executable, "-c", _AS_STRANGER, str(limit + threads_of_user()), *FAKE]
    return ServerProcess(folder, command, **settings)


def channel(address: str) -> grpc.Channel:
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    return grpc.insecure_channel(address, options=options)


def unread(address: str, path: str, request: bytes, count: int) -> tuple[Any, list[Any]]:
    """Calls whose replies nobody reads: a stream of replies that is never asked for one."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1), *WINDOW]
    way = grpc.insecure_channel(address, options=options)
    return way, [way.unary_stream(path)(request) for _ in range(count)]


def healthy(address: str) -> bool:
    """The answer to a liveness probe."""
    with channel(address) as way:
        reply = health_pb2_grpc.HealthStub(way).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def silent_calls(way: grpc.Channel, path: str, count: int, hold: Any) -> list[Any]:
    """Calls whose request never comes, until ``hold`` is set."""

    def nothing() -> Iterator[bytes]:
        hold.wait(60)
        yield from ()

    return [way.stream_unary(path).future(nothing()) for _ in range(count)]


def copies(client: Client) -> bytes:
    """A run of the fake engine, from session to result."""
    reply = client.dispatch.Run(
        dp.RunRequest(
            session=client.token,
            operation="copy",
            inputs=[tp.Operand(name="x", spec=floats(4), location=inline(bytes(range(16))))],
        ),
        timeout=WAIT_S,
    )
    return bytes(reply.outputs[0].inline)


def bystander_lives(address: str, *, statistics: bool = False) -> None:
    """Health, a new session, statistics and a run of a newcomer, each within its deadline."""
    assert healthy(address)
    with Client(address, session=False) as client:
        client.lease = client.memory.OpenSession(mp.OpenSessionRequest(client_name="bystander"), timeout=WAIT_S)
        client.opened = next(client.lease).opened
        if statistics:
            assert client.kernels.Statistics(kp.StatisticsRequest(), timeout=WAIT_S)
        else:
            assert copies(client) == bytes(range(16))


@contextlib.contextmanager
def stopped(server: ServerProcess, program: str) -> Iterator[subprocess.Popen[str]]:
    """A client that is stopped in the middle of its work, where it says "there", and killed in the end."""
    command = [sys.executable, "-c", program, server.addresses[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGSTOP)
        try:
            yield process
        finally:
            process.kill()


class SparseFile(MemoryFile):
    """Without a page of its own."""

    def __init__(self, nbytes: int, *, sealed: bool = True) -> None:
        super().__init__(PAGE, sealed=False)
        self.bytes.close()
        os.ftruncate(self.fd, 0)
        os.ftruncate(self.fd, nbytes)
        self.nbytes = nbytes
        self.seal(sealed)

    @property
    def kept(self) -> int:
        """Bytes that it takes."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        os.close(self.fd)


class Peak:
    """The most memory that a server held of its own, looked at again and again."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._over = threading.Event()
        self.before = self.most = self._now()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _now(self) -> float:
        status = Path(f"/proc/{self._server.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1024

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, self._now())

    def grown_mib(self) -> float:
        self._over.set()
        self._thread.join()
        return max(self.most, self._now()) - self.before

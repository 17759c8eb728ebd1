"""A server in another process, and a client of bare stubs that can misbehave."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import dispatch_pb2_grpc, error_pb2, kernels_pb2_grpc, memory_pb2_grpc
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp
from tilewright_server.memory.regions import Region
from tilewright_server.memory.shm import open_memfd
from tilewright_server.session.session import Session

F_ADD_SEALS = 1033
SEAL, SHRINK = 1, 2
FAKE = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
REAL = [
    sys.executable,
    "-c",
    "import sys; from tilewright_server import app, settings; sys.exit(app.Application(settings.load()).run())",
]


def _is_clients(text: str) -> bool:
    return "/memfd:tilewright-" in text or "/dev/shm/tilewright-" in text


class ServerProcess:
    """Started and ready; ends with ``stop``."""

    def __init__(self, folder: Path, command: list[str] | None = None, **settings: Any) -> None:
        self.socket = folder / "s.sock"
        # Without the watchdog, whose connection would show among descriptors and threads.
        own = {"listen": f"unix:{self.socket}", "cache_dir": str(folder / "cache"), "watchdog_s": 0}
        settings = own | settings
        env = {key: value for key, value in os.environ.items() if not key.startswith("TILEWRIGHT_")}
        env |= {f"TILEWRIGHT_{name.upper()}": str(value) for name, value in settings.items()}
        self.log_path = folder / "server.log"
        started = time.monotonic()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command or FAKE, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline().strip()
        self.start_seconds = time.monotonic() - started
        self.addresses = self.ready.removeprefix("ready: ").split()
        if not self.ready.startswith("ready: "):
            self.stop()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        return self.log_path.read_text()

    def descriptors(self) -> list[str]:
        """What its open descriptors lead to."""
        links = []
        for item in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.append(str(item.readlink()))
        return sorted(links)

    def regions(self) -> tuple[int, int]:
        """How many memory files of clients it has mapped, and how many open."""
        maps = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return sum(map(_is_clients, maps)), sum(map(_is_clients, self.descriptors()))

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 60) -> int:
        return self.process.wait(timeout)

    def stop(self) -> int:
        """End it, the hard way if need be; returns its exit status."""
        if self.alive:
            self.signal()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.wait()
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()


class MemoryFile:
    """A memfd as clients make it; ``sealed=False`` leaves out the seals."""

    def __init__(self, nbytes: int, *, sealed: bool = True, name: str = "") -> None:
        self.name = name or "tilewright-" + secrets.token_hex(16)
        self.nbytes = nbytes
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        for at in range(0, nbytes, 1 << 20):
            os.pwrite(self.fd, bytes(min(1 << 20, nbytes - at)), at)
        self.seal(sealed)
        self.bytes = mmap.mmap(self.fd, nbytes)

    def seal(self, sealed: bool) -> None:
        if sealed:
            fcntl.fcntl(self.fd, F_ADD_SEALS, SEAL | SHRINK)

    def source(self, **changes: Any) -> mp.MemfdSource:
        return mp.MemfdSource(**({"pid": os.getpid(), "fd": self.fd, "name": self.name} | changes))

    def close(self) -> None:
        self.bytes.close()
        os.close(self.fd)


def register(session: Session, file: MemoryFile) -> Region:
    """Register a file with a session of this very process."""
    source = file.source()
    return session.register(lambda: open_memfd(source.pid, source.fd, source.name, file.nbytes))


class Client:
    """One session over one channel."""

    def __init__(self, address: str, *, session: bool = True) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
        ]
        self.address = address
        self.channel = grpc.insecure_channel(address, options=options)
        self.memory = memory_pb2_grpc.MemoryStub(self.channel)
        self.dispatch = dispatch_pb2_grpc.DispatchStub(self.channel)
        self.kernels = kernels_pb2_grpc.KernelsStub(self.channel)
        self.lease: Any = None
        self.opened = mp.SessionEvent.Opened()
        if session:
            self.open()

    def open(self) -> None:
        self.lease = self.memory.OpenSession(mp.OpenSessionRequest(client_name="test"), wait_for_ready=True)
        self.opened = next(self.lease).opened

    @property
    def token(self) -> bytes:
        return self.opened.session

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self.lease is not None:
            self.lease.cancel()
        self.channel.close()

    def register(self, file: MemoryFile, nbytes: int | None = None, **changes: Any) -> mp.RegisterRegionReply:
        request = mp.RegisterRegionRequest(
            session=self.token, memfd=file.source(**changes), bytes=file.nbytes if nbytes is None else nbytes
        )
        return self.memory.RegisterRegion(request)

    def unregister(self, region: int, **options: Any) -> None:
        self.memory.UnregisterRegion(mp.UnregisterRegionRequest(session=self.token, region=region), **options)

    def status(self) -> mp.StatusReply:
        return self.memory.Status(mp.StatusRequest(session=self.token))

    def copy(self, x: tp.Location, y: tp.Location | None = None, count: int = 16, **attributes: float) -> dp.RunReply:
        """Run the fake engine's operation on ``count`` floats."""
        outputs = [] if y is None else [tp.Operand(name="y", location=y)]
        request = dp.RunRequest(
            session=self.token,
            operation="copy",
            inputs=[tp.Operand(name="x", spec=floats(count), location=x)],
            outputs=outputs,
            attributes={key: tp.Attribute(number=value) for key, value in attributes.items()},
        )
        return self.dispatch.Run(request)

    def plan(self, count: int = 16, **attributes: float) -> int:
        request = dp.PlanRequest(
            session=self.token,
            operation="copy",
            inputs=[tp.Operand(name="x", spec=floats(count))],
            attributes={key: tp.Attribute(number=value) for key, value in attributes.items()},
        )
        return self.dispatch.Plan(request).plan

    def execution(self, plan: int, *locations: tp.Location, **more: Any) -> dp.ExecuteRequest:
        return dp.ExecuteRequest(session=self.token, executions=[dp.Execution(plan=plan, locations=locations)], **more)

    def binding(self, plan: int, *locations: tp.Location) -> dp.BindRequest:
        return dp.BindRequest(session=self.token, execution=dp.Execution(plan=plan, locations=locations))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def floats(*shape: int) -> tp.TensorSpec:
    return tp.TensorSpec(dtype=tp.FP32, shape=shape)


def in_region(region: int, offset: int = 0) -> tp.Location:
    return tp.Location(region=tp.RegionSlice(region=region, offset=offset))


def in_buffer(buffer: int, offset: int = 0) -> tp.Location:
    return tp.Location(buffer=tp.BufferSlice(buffer=buffer, offset=offset))


def inline(data: bytes) -> tp.Location:
    return tp.Location(inline=data)


def detail_of(error: grpc.RpcError) -> error_pb2.ErrorDetail:
    """The structured details that every error of ours carries."""
    metadata = dict(error.trailing_metadata() or ())
    assert "tilewright-error-bin" in metadata, f"untyped: {error.code()} {error.details()}"
    return error_pb2.ErrorDetail.FromString(metadata["tilewright-error-bin"])


@contextlib.contextmanager
def refused(code: str, rule: str = "", text: str = "") -> Iterator[list[error_pb2.ErrorDetail]]:
    """The call inside fails with a typed error."""
    found: list[error_pb2.ErrorDetail] = []
    try:
        yield found
    except grpc.RpcError as error:
        found.append(detail_of(error))
    assert found, "the call succeeded"
    assert found[0].code == code, found[0]
    assert not rule or found[0].rule == rule, found[0]
    assert text in found[0].message


def eventually(condition: Any, timeout: float = 30.0) -> bool:
    """Whether ``condition`` becomes true in time, which is long, for busy machines."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True

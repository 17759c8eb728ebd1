"""Servers whose system calls fail at step N, and what must hold whatever fails."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from local_harness import BIND, CALL, HEADER, HELLO, LAUNCH, REGISTER, TIME, Wire, bind_request
from rpc_harness import FAKE, Client, MemoryFile, ServerProcess, detail_of, eventually, in_buffer, in_region, inline

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp

__all__ = [
    "FAKE",
    "SPARE",
    "Control",
    "Fault",
    "Kind",
    "Role",
    "What",
    "answers",
    "at_the_step",
    "excess",
    "faulty_server",
    "front",
    "held",
    "python",
    "rest",
    "survives",
]

HEALTH_S = 1.0
REST_S = 10.0
"""How long what was held may take to be given back."""
FIELDS = ("armed", "kinds", "role", "what", "code", "left", "seen", "fired", "server", "jumped")
SHIM = Path(__file__).with_name("shim.c")


class Kind(enum.IntFlag):
    """Calls by what they ask of the system; see ``shim.c``."""

    MAP, TRUNCATE, OPEN, WRITE, READ, FORK, SOCKET, THREAD, CLOCK, ALLOC, DRIVER = (1 << bit for bit in range(11))


class What(enum.IntEnum):
    """Fates of a call."""

    FAIL, KILL, SHORT, PAUSE, EXIT, JUMP, LOSE = range(7)


class Role(enum.IntEnum):
    """Processes of a server."""

    SERVER, WORKER, OTHER = range(3)


class Fault(NamedTuple):
    """A way to fail."""

    kind: Kind
    what: What
    code: int = 0
    role: Role = Role.SERVER

    def __str__(self) -> str:
        code = errno.errorcode.get(self.code, str(self.code)) if self.what is What.FAIL else str(self.code or "")
        return "-".join(filter(None, (self.role.name, str(self.kind.name), self.what.name, code))).lower()


class Control:
    """The file by which the shim is told what to do."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8 * len(FIELDS)))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 8 * len(FIELDS))
        self._values = (ctypes.c_int64 * len(FIELDS)).from_buffer(self._bytes)

    def __getitem__(self, name: str) -> int:
        return self._values[FIELDS.index(name)]

    def __setitem__(self, name: str, value: int) -> None:
        self._values[FIELDS.index(name)] = value

    @contextlib.contextmanager
    def armed(self, fault: Fault, step: int) -> Iterator[None]:
        """The ``step``-th call of the fault's kind fails, inside."""
        for name, value in (("kinds", fault.kind), ("role", fault.role), ("what", fault.what), ("code", fault.code)):
            self[name] = value
        self["left"], self["seen"], self["fired"] = step, 0, 0
        self["armed"] = 1
        try:
            yield
        finally:
            self["armed"] = self["jumped"] = 0


def shim(folder: Path) -> Path:
    """The library, built; skips where that cannot be."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc)")
    library = folder / "shim.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SHIM), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the shim cannot be built for this C library: {done.stderr.splitlines()[0]}")
    return library


@contextlib.contextmanager
def faulty_server(folder: Path, command: list[str], **settings: Any) -> Iterator[tuple[ServerProcess, Control]]:
    """A server with the shim in all of its processes."""
    control = Control(folder / "control")
    before = dict(os.environ)
    os.environ |= {"LD_PRELOAD": str(shim(folder)), "TW_FAULTS": str(folder / "control")}
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # servers do without, and this process may have asked for it
    try:
        server = ServerProcess(folder, command, **settings)
    finally:
        os.environ.clear()
        os.environ.update(before)
    with server:
        assert server.ready, server.log()
        control["server"] = server.pid
        yield server, control


class Held(NamedTuple):
    """Figures of what a server holds, kernels that are loaded aside."""

    descriptors: int
    mapped: int
    opened: int
    threads: int
    mappings: int
    memory_mib: float


SPARE = Held(descriptors=0, mapped=0, opened=0, threads=2, mappings=16, memory_mib=4.0)
"""More than before that is no leak: a thread for calls is started when it is needed, with its stack and its heap, and
100 scenarios without a fault take a MiB of the interpreter's."""


def held(server: ServerProcess) -> Held:
    files = [link for link in server.descriptors() if "/cache/objects/" not in link]
    maps = [line for line in Path(f"/proc/{server.pid}/maps").read_text().splitlines() if "/cache/objects/" not in line]
    status = Path(f"/proc/{server.pid}/status").read_text()
    memory = int(status.split("RssAnon:")[1].split()[0]) / 1024
    threads = len(list(Path(f"/proc/{server.pid}/task").iterdir()))
    return Held(len(files), *server.regions(), threads, len(maps), memory)


class Broken(Exception):
    """A connection that the server gave up, as it may where the system fails it."""


def survives(
    server: ServerProcess,
    control: Control,
    fault: Fault,
    scenario: Callable[[str], None],
    steps: Iterator[int],
    patience: float = REST_S,
    spare: Held = SPARE,
    also: Callable[[], int] = lambda: 0,
) -> int:
    """Run a scenario with the first, the second, ... call failing, until it passes without a failure. Each time its
    result is right or its error has a type, the server answers within a second, and it holds what it held before.
    Returns how many calls were made to fail. ``also`` counts what else must not grow.
    """
    for _ in range(3):  # threads and caches that stay
        scenario(server.addresses[0])
    rest(server)
    before, counted = held(server), also()
    fired = 0
    for step in steps:
        with control.armed(fault, step):
            with contextlib.suppress(Broken):
                typed(lambda: scenario(server.addresses[0]), fault)
            failed = control["fired"]
        fired += failed
        where = f"{fault}, step {step}"
        assert server.alive, f"{where}: the server ended\n{server.log()[-4000:]}"
        answers(server.addresses[0], where)
        assert eventually(lambda: not excess(held(server), before, spare), patience), (
            f"{where}: more {excess(held(server), before, spare)}: {before} became {held(server)}: "
            f"{server.descriptors()}"
        )
        assert eventually(lambda: also() <= counted, patience), f"{where}: {counted} became {also()}"
        if not failed:
            break
    typed(lambda: scenario(server.addresses[0]), None)
    return fired


def excess(now: Held, before: Held, spare: Held) -> list[str]:
    """Names of what more is held of than before."""
    return [name for name, a, b, c in zip(Held._fields, now, before, spare, strict=True) if a > b + c]


def rest(server: ServerProcess) -> None:
    """Wait until a server holds the same for a while."""
    end, last = time.monotonic() + REST_S, held(server)
    same = 0
    while same < 10 and time.monotonic() < end:
        time.sleep(0.02)
        now = held(server)
        same, last = (same + 1 if now[:4] == last[:4] else 0), now


def typed(work: Callable[[], None], fault: Fault | None) -> None:
    """Errors of gRPC have details and are no internal ones. Raises ``Broken`` for connections that ended, as they may
    where calls of sockets fail or the other end was killed."""
    try:
        work()
    except grpc.RpcError as error:
        if fault is not None and fault.kind & (Kind.SOCKET | Kind.ALLOC) and is_broken(error):
            raise Broken from None
        detail = detail_of(error)
        assert fault is not None, detail
        assert detail.code not in ("", "internal"), detail
    except (ConnectionError, TimeoutError, BrokenPipeError) as error:
        assert fault is not None, error
        ends = fault.what in (What.KILL, What.LOSE, What.PAUSE)  # of a process, a device, a session
        assert ends or fault.kind & (Kind.SOCKET | Kind.OPEN | Kind.THREAD), error
        raise Broken from None


def is_broken(error: grpc.RpcError) -> bool:
    """True for the end of a connection, which no server said anything about."""
    if "tilewright-error-bin" in dict(error.trailing_metadata() or ()):
        return False
    return bool(error.code() is grpc.StatusCode.UNAVAILABLE)


def answers(address: str, where: str) -> None:
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as way:
        try:
            health_pb2_grpc.HealthStub(way).Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_S)
        except grpc.RpcError as error:
            raise AssertionError(f"{where}: no answer about health: {error}") from None


DATA = bytes(range(64))


def front(address: str, opened: Callable[[Client], object] = lambda client: None) -> None:
    """All kinds of objects of a session of the fake engine: made, used over gRPC and the local socket, and ended.
    ``opened`` is told of the session."""
    with contextlib.ExitStack() as ends:
        files = [MemoryFile(4096), MemoryFile(4096, sealed=False)]
        for file in files:
            ends.callback(file.close)
            file.bytes[:64] = DATA
        client = ends.enter_context(Client(address))
        opened(client)
        sealed, guarded = (client.register(file).region for file in files)
        plan = client.plan(16)
        for region, file in ((sealed, files[0]), (guarded, files[1])):
            file.bytes[64:128] = bytes(64)
            request = client.execution(plan, in_region(region), in_region(region, 64))
            raised(client.dispatch.Execute(request))
            assert file.bytes[64:128] == DATA
        buffer = client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=64)).buffer
        client.memory.WriteBuffer(
            mp.WriteBufferRequest(session=client.token, buffer=buffer, region=in_region(guarded).region, bytes=64)
        )
        reply = client.memory.ReadBuffer(mp.ReadBufferRequest(session=client.token, buffer=buffer, bytes=64))
        assert reply.data == DATA
        raised(client.dispatch.Execute(client.execution(plan, inline(DATA), in_buffer(buffer))))
        launched(client, plan, ends)
        client.unregister(guarded)
        client.status()


def launched(client: Client, plan: int, ends: contextlib.ExitStack) -> None:
    """Memory by its descriptor, a binding, and its launches."""
    file = MemoryFile(4096)
    ends.callback(file.close)
    file.bytes[:64] = DATA
    wire = ends.enter_context(Wire(client.opened.local_socket))
    asked(wire, HELLO, 1, client.token)
    request = mp.RegisterRegionRequest(attached={}, bytes=4096)
    region = asked(wire, CALL, REGISTER, request.SerializeToString(), [file.fd])
    request = bind_request(plan, in_region(region), in_region(region, 64))
    binding = asked(wire, CALL, BIND, request.SerializeToString())
    for _ in range(2):
        file.bytes[64:128] = bytes(64)
        asked(wire, LAUNCH, binding, flags=TIME)
        assert file.bytes[64:128] == DATA


def asked(wire: Wire, kind: int, value: int, payload: bytes = b"", fds: Sequence[int] = (), flags: int = 0) -> int:
    """The value of a reply. Raises ``Refused`` for errors, also such as answer no packet of ours."""
    wire.sequence += 1
    wire.send(HEADER.pack(kind, flags, 0, wire.sequence, value) + payload, fds)
    reply = wire.receive()
    if reply is None:
        raise ConnectionResetError
    if reply.error is not None:
        raise Refused(reply.error)
    assert (reply.kind, reply.sequence) == (0x80 | kind, wire.sequence)
    return reply.value


class Refused(grpc.RpcError):  # type: ignore[misc]
    """A typed error that came otherwise than as a status."""

    def __init__(self, detail: Any) -> None:
        super().__init__(str(detail))
        self._detail = detail

    def trailing_metadata(self) -> Any:
        return (("tilewright-error-bin", self._detail.SerializeToString()),)


def raised(reply: dp.ExecuteReply) -> None:
    for result in reply.results:
        if result.HasField("error"):
            raise Refused(result.error)


@contextlib.contextmanager
def at_the_step(control: Control, work: Callable[[], object]) -> Iterator[None]:
    """Do something once, at the moment when a call is held up."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if control["armed"] and control["fired"]:
                work()
                return
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def python(code: str) -> list[str]:
    """A command that runs code, and sees the modules that this process sees."""
    return [sys.executable, "-c", f"import sys\nsys.path[:0] = {sys.path!r}\n{code}"]

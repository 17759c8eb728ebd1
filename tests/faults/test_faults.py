"""Whatever call of the system fails, and at whatever step: results are right or errors have a type, nothing is leaked,
and the server goes on.
"""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from fault_harness import (
    FAKE,
    Control,
    Fault,
    Kind,
    Refused,
    Role,
    What,
    at_the_step,
    faulty_server,
    front,
    python,
    raised,
    survives,
)
from rpc_harness import Client, ServerProcess, detail_of, eventually, in_buffer, inline

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

FRONT = [
    Fault(Kind.MAP, What.FAIL, errno.ENOMEM),
    Fault(Kind.ALLOC, What.FAIL, errno.ENOMEM),
    Fault(Kind.OPEN, What.FAIL, errno.EMFILE),
    Fault(Kind.OPEN, What.FAIL, errno.ENOMEM),
    Fault(Kind.READ, What.FAIL, errno.EINTR),
    Fault(Kind.READ, What.SHORT),
    Fault(Kind.SOCKET, What.FAIL, errno.EINTR),
    Fault(Kind.SOCKET, What.FAIL, errno.ENOBUFS),
    Fault(Kind.THREAD, What.FAIL, errno.EAGAIN),
    Fault(Kind.CLOCK, What.JUMP, 10 * 365 * 86400),
    Fault(Kind.CLOCK, What.JUMP, -10 * 365 * 86400),
]
MOST = 400
"""Steps of a scenario that passes through long before."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Control]]:
    with faulty_server(tmp_path_factory.mktemp("faulty"), FAKE) as made:
        yield made
        server = made[0]
        assert "Traceback" not in server.log(), server.log()[-4000:]


@pytest.mark.parametrize("fault", FRONT, ids=str)
def test_a_call_that_fails_at_any_step_harms_nothing(faulty: tuple[ServerProcess, Control], fault: Fault) -> None:
    fired = survives(*faulty, fault, front, iter(range(1, MOST)))
    assert 0 < fired < MOST - 1, "there was something to fail, and it passed through in the end"


WRITES = [
    Fault(Kind.WRITE, What.FAIL, errno.ENOSPC),
    Fault(Kind.WRITE, What.FAIL, errno.EINTR),
    Fault(Kind.WRITE, What.SHORT),
]
UNGUARDED = python(
    f"""
import runpy
from tilewright_server.memory import guard
guard._library = lambda: None  # as where the system refuses userfaultfd: memory that may shrink is written by calls
runpy.run_path({FAKE[1]!r}, run_name="__main__")
"""
)


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Control]]:
    with faulty_server(tmp_path_factory.mktemp("unguarded"), UNGUARDED) as made:
        yield made


@pytest.mark.parametrize("fault", WRITES, ids=str)
def test_a_write_that_fails_at_any_step_harms_nothing(unguarded: tuple[ServerProcess, Control], fault: Fault) -> None:
    fired = survives(*unguarded, fault, front, iter(range(1, MOST)))
    assert 0 < fired < MOST - 1, "there was something to fail, and it passed through in the end"


PLANTED = """
import mmap, os, threading
from tilewright_server.memory import regions

kept = []
leaks = {{
    "descriptors": lambda fd: os.dup(fd),
    "mappings": lambda fd: kept.append(mmap.mmap(-1, 4096)),
    "memory_mib": lambda fd: kept.append(b"x" * 100_000),
    "threads": lambda fd: threading.Thread(target=threading.Event().wait, daemon=True).start(),
}}

class Leaking(regions.Mapping):
    def __init__(self, fd, nbytes):
        try:
            super().__init__(fd, nbytes)
        except Exception:
            leaks[{what!r}](fd)
            raise

regions.Mapping = Leaking
import runpy
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.extended
@pytest.mark.parametrize("what", ["descriptors", "mappings", "memory_mib", "threads"])
def test_a_planted_leak_is_found(tmp_path: Path, what: str) -> None:
    """Where memory cannot be mapped something is kept, and nowhere else: a descriptor, a page, 100 kB or a thread."""
    with faulty_server(tmp_path, python(PLANTED.format(script=FAKE[1], what=what))) as (server, control):
        elsewhere, there = (Fault(kind, What.FAIL, errno.ENOMEM) for kind in (Kind.OPEN, Kind.MAP))
        survives(server, control, elsewhere, front, iter(range(1, MOST)))
        with pytest.raises(AssertionError, match=rf"more \[.*'{what}'"):
            survives(server, control, there, front, itertools.repeat(1, 80), 1.0)


LEASE = Fault(Kind.MAP | Kind.OPEN | Kind.READ | Kind.WRITE | Kind.SOCKET, What.PAUSE)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.extended)])
def test_a_session_may_end_at_any_step(faulty: tuple[ServerProcess, Control], stride: int) -> None:
    """The client takes its lease back while the server is held up in one call of the system after the other."""
    server, control = faulty
    sessions: list[Client] = []

    def scenario(address: str) -> None:
        with at_the_step(control, lambda: sessions[-1].lease.cancel() if sessions else None):
            front(address, sessions.append)

    # One call of a stride is held up: a pause takes as long as a scenario.
    assert survives(server, control, LEASE, scenario, iter(range(1, MOST, stride))) > 3


BUILDS = [
    Fault(Kind.OPEN, What.FAIL, errno.EMFILE),
    Fault(Kind.WRITE, What.FAIL, errno.ENOSPC),
    Fault(Kind.WRITE, What.SHORT),
    Fault(Kind.READ, What.SHORT),
    Fault(Kind.FORK, What.FAIL, errno.EAGAIN),
    Fault(Kind.OPEN, What.EXIT, 1, Role.OTHER),
    Fault(Kind.OPEN, What.KILL, 0, Role.OTHER),
    Fault(Kind.OPEN, What.FAIL, errno.EMFILE, Role.OTHER),
]
OPERATION = Path(__file__).parents[1] / "server" / "app" / "operation_server.py"
REAL = python(
    f"""
import runpy, subprocess
subprocess._USE_VFORK = False  # a fork that may fail can be put before fork() only
sys.argv = [{str(OPERATION)!r}, "gemm"]
runpy.run_path({str(OPERATION)!r}, run_name="__main__")
"""
)


@pytest.fixture
def building(tmp_path: Path) -> Iterator[tuple[ServerProcess, Control]]:
    """A server of the real engine whose every kernel is still to be built, by a compiler that may be made to fail.
    (Compilers get no environment of the server's.)"""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++)")
    script = tmp_path / "c++"
    preload = f"LD_PRELOAD={tmp_path}/shim.so TW_FAULTS={tmp_path}/control"
    script.write_text(f'#!/bin/sh\n{preload} exec {compiler} "$@" -O0\n')  # there are many builds
    script.chmod(0o700)
    with faulty_server(tmp_path, REAL, build_workers=1, compiler=script, max_loaded_kernels=2) as made:
        yield made


@pytest.fixture
def kernels(building: tuple[ServerProcess, Control]) -> Iterator[str]:
    """Names of kernels, each to be built once."""
    names = []
    with Client(building[0].addresses[0]) as client:
        for dtype in ("fp32", "fp16"):
            request = kp.ListKernelsRequest(filter=kp.KernelFilter(operation="gemm", name=f"*_{dtype}_??r_*_1x1x1_*"))
            names += [item.name for item in client.kernels.List(request).kernels]
    return (name for name in names if "preshuffle" not in name and "multid" not in name)


def doubled() -> Iterator[int]:
    """Steps in powers of two."""
    return (1 << bit for bit in range(12))


def every() -> Iterator[int]:
    return iter(range(1, MOST))


PART = pytest.param(doubled, marks=pytest.mark.extended, id="part")
ALL = pytest.param(every, marks=pytest.mark.exhaustive, id="all")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [PART, ALL])
@pytest.mark.parametrize("fault", BUILDS, ids=str)
def test_a_build_that_fails_at_any_step_harms_nothing(
    building: tuple[ServerProcess, Control],
    kernels: Iterator[str],
    fault: Fault,
    steps: Callable[[], Iterator[int]],
) -> None:
    """Each step is of a new kernel; one whose build failed can be built afterwards."""
    server, control = building
    failed: list[str] = []

    def scenario(address: str) -> None:
        name = failed.pop() if failed and not control["armed"] else next(kernels)
        failed.append(name)
        with Client(address) as client:
            built(client, name)
        failed.clear()

    fired = survives(server, control, fault, scenario, steps())
    assert 0 < fired < MOST - 1, "there was something to fail, and it passed through in the end"


def built(client: Client, name: str) -> None:
    """Build a kernel and multiply by it. Raises its error."""
    events = list(client.kernels.Build(kp.BuildRequest(operation="gemm", names=[name], retry_failed=True), timeout=120))
    assert events[-1].name == name
    if events[-1].HasField("error"):
        raise Refused(events[-1].error)
    _, dtype, layout, *_ = name.split("_")
    kind = np.dtype(np.float16 if dtype == "fp16" else np.float32)
    a, b = np.random.default_rng(1).integers(-4, 5, (2, 16, 16)).astype(kind)  # sums are exact in both
    inputs = []
    for operand, values, order in zip("ab", (a, b), layout, strict=False):  # rows or columns first
        strides = [16, 1] if order == "r" else [1, 16]
        spec = tp.TensorSpec(dtype=tp.FP16 if dtype == "fp16" else tp.FP32, shape=[16, 16], strides=strides)
        data = values if order == "r" else values.T
        inputs.append(tp.Operand(name=operand, spec=spec, location=inline(data.tobytes())))
    request = dp.RunRequest(
        session=client.token,
        operation="gemm",
        inputs=inputs,
        selection=dp.Selection(strategy="explicit", kernel=name),
    )
    reply = client.dispatch.Run(request, timeout=120)
    np.testing.assert_array_equal(np.frombuffer(reply.outputs[0].inline, kind).reshape(16, 16), a @ b)


WORKER = [
    Fault(Kind.SOCKET, What.KILL, 0, Role.WORKER),
    Fault(Kind.SOCKET, What.FAIL, errno.EINTR, Role.WORKER),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [PART, ALL])
@pytest.mark.parametrize("fault", WORKER, ids=str)
def test_a_device_whose_process_dies_at_any_step_is_opened_again(
    tmp_path: Path, kernel_cache: Path, fault: Fault, steps: Callable[[], Iterator[int]]
) -> None:
    """Each step has a server of its own: a kernel that seems to kill again and again is not run."""
    fired = 0
    for step in steps():
        folder = tmp_path / str(step)
        folder.mkdir()
        with faulty_server(folder, REAL, cpu_isolated=True, cache_dir=kernel_cache) as (server, control):
            in_buffers(server.addresses[0])
            failed = survives(server, control, fault, lives_again, iter((step,)))
            fired += failed
        if not failed:
            break
    assert fired and not failed


def lives_again(address: str) -> None:
    """A product, which errors of a lost device are followed by; its error after that of another attempt."""
    try:
        in_buffers(address)
    except grpc.RpcError as error:
        assert detail_of(error).code == "unavailable", detail_of(error)
        assert eventually(lambda: succeeds(address))
        raise


def succeeds(address: str) -> bool:
    try:
        in_buffers(address)
    except grpc.RpcError:
        return False
    return True


def in_buffers(address: str) -> None:
    """A product of operands that the device's process keeps."""
    with Client(address) as client:
        buffers = [
            client.memory.CreateBuffer(mp.CreateBufferRequest(session=client.token, bytes=256)).buffer for _ in range(3)
        ]
        a = np.arange(64, dtype=np.float32).reshape(8, 8)
        for buffer in buffers[:2]:
            client.memory.WriteBuffer(mp.WriteBufferRequest(session=client.token, buffer=buffer, data=a.tobytes()))
        spec = tp.TensorSpec(dtype=tp.FP32, shape=[8, 8])
        inputs = [tp.Operand(name=name, spec=spec) for name in "ab"]
        plan = client.dispatch.Plan(dp.PlanRequest(session=client.token, operation="gemm", inputs=inputs)).plan
        for _ in range(3):
            request = client.execution(plan, *(in_buffer(buffer) for buffer in buffers))
            raised(client.dispatch.Execute(request))
            reply = client.memory.ReadBuffer(mp.ReadBufferRequest(session=client.token, buffer=buffers[2], bytes=256))
            np.testing.assert_array_equal(np.frombuffer(reply.data, np.float32).reshape(8, 8), a @ a)

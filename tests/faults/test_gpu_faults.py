"""A GPU whose driver is simulated: its process dies, calls of its driver fail, the driver is reset and leases end, at
one step after the other. Errors have types, what is written is read again, nothing is leaked, and the device is used
again.

Kernels leave their outputs as they were: an output holds afterwards what was written to it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from fault_harness import (
    SPARE,
    Control,
    Fault,
    Kind,
    Role,
    What,
    asked,
    at_the_step,
    faulty_server,
    python,
    raised,
    survives,
)
from local_harness import ATTACH, BIND, CALL, HELLO, LAUNCH, TIME, Wire, bind_request
from rpc_harness import Client, ServerProcess, detail_of, eventually, floats, in_buffer
from simulated_gpu import SIMULATED, TAG, built

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("cuda") is None,
        reason="NVIDIA's packages are not installed: pip install 'tilewright[cuda]'",
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
]
SERVE = """
import os, sys
from tilewright_server.devices.cuda import discovery
from tilewright_server.engine.planning import quarantine
discovery._LIBRARIES = (os.environ["TW_SIMULATED_CUDA"],)
quarantine._ENOUGH = float("inf")  # else a kernel that was there at two deaths is refused
from tilewright_tools.cli import main
sys.exit(main(["serve"]))
"""
SIDE = 64
STEP = SIDE * SIDE * 4
DATA = bytes(range(256)) * (STEP // 256)
OUT_OF_MEMORY, ILLEGAL_ADDRESS, UNKNOWN = 2, 700, 999
CONNECTED = SPARE._replace(descriptors=4, memory_mib=16.0)
"""Server and worker have a connection for each of their threads that talk, made when it is needed; and the first error
of a kind imports modules."""
MOST = 2000
"""Steps of a scenario that passes through long before."""


class Faulty(NamedTuple):
    """A server whose device is simulated."""

    server: ServerProcess
    control: Control

    @property
    def worker(self) -> int:
        """The device's process; 0 while there is none."""
        found = Path(f"/proc/{self.server.pid}/task")
        for task in found.iterdir():
            with contextlib.suppress(OSError):
                for pid in (task / "children").read_text().split():
                    if b"devices.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return int(pid)
        return 0

    def memory(self) -> int:
        """How many pieces of the device's memory its process has, and descriptors other than connections."""
        worker = self.worker
        held = len(list(Path("/dev/shm").glob(f"tw{TAG}-*-{worker}-*")))
        with contextlib.suppress(OSError):  # it is gone
            for item in Path(f"/proc/{worker}/fd").iterdir():
                with contextlib.suppress(OSError):
                    held += not str(item.readlink()).startswith("socket:")
        return held


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty-gpu")
    library = built(SIMULATED / "libcuda.c", folder / "libcuda.so.1")
    driver = {"LD_LIBRARY_PATH": folder, "TW_SIMULATED_CUDA": library, "TW_SIM_TAG": TAG, "TW_SIM_DEVICES": 1}
    command = ["env", *(f"{name}={value}" for name, value in driver.items()), *python(SERVE)]
    settings = {"device": "cuda:0", "cpu_threads": 1, "cache_dir": kernel_cache}
    try:
        with faulty_server(folder, command, **settings) as made:
            yield Faulty(*made)
            assert "Traceback" not in made[0].log(), made[0].log()[-4000:]
    finally:
        for left in Path("/dev/shm").glob(f"tw{TAG}-*"):
            left.unlink(missing_ok=True)


def on_gpu(address: str, opened: Callable[[Client], object] = lambda client: None) -> None:
    """Memory, plans, bindings and launches on the device, over gRPC and over a connection to its process."""
    with contextlib.ExitStack() as ends:
        client = ends.enter_context(Client(address))
        opened(client)
        request = mp.CreateBufferRequest(session=client.token, bytes=3 * STEP, device="cuda:0")
        buffer = client.memory.CreateBuffer(request).buffer
        client.memory.WriteBuffer(
            mp.WriteBufferRequest(session=client.token, buffer=buffer, data=DATA * 3, bytes=3 * STEP)
        )
        spec = floats(SIDE, SIDE)
        inputs = [tp.Operand(name=name, spec=spec) for name in "ab"]
        made = client.dispatch.Plan(
            dp.PlanRequest(
                session=client.token,
                operation="gemm",
                inputs=inputs,
                outputs=[tp.Operand(name="out", spec=spec)],
                selection=dp.Selection(device="cuda:0"),
            )
        )
        places = [in_buffer(buffer, place * STEP) for place in range(3)]
        raised(client.dispatch.Execute(client.execution(made.plan, *places)))
        control, lane = (ends.enter_context(Wire(client.opened.local_socket)) for _ in range(2))
        for wire in (control, lane):
            asked(wire, HELLO, 1, client.token)
        asked(lane, ATTACH, 0, b"cuda:0")
        binding = asked(control, CALL, BIND, bind_request(made.plan, *places).SerializeToString())
        for _ in range(2):
            asked(lane, LAUNCH, binding, flags=TIME)
        reply = client.memory.ReadBuffer(mp.ReadBufferRequest(session=client.token, buffer=buffer, bytes=3 * STEP))
        assert reply.data == DATA * 3


def again(address: str, work: Callable[[str], None] = on_gpu) -> None:
    """The work; its error after that of another attempt, which must succeed."""
    try:
        work(address)
    except (grpc.RpcError, OSError):
        assert eventually(lambda: succeeds(address))
        raise


def succeeds(address: str) -> bool:
    try:
        on_gpu(address)
    except (grpc.RpcError, OSError):
        return False
    return True


def doubled() -> Iterator[int]:
    """Steps in powers of two."""
    return (1 << bit for bit in range(12))


def every() -> Iterator[int]:
    return iter(range(1, MOST))


PART = pytest.param(doubled, marks=pytest.mark.extended, id="part")
ALL = pytest.param(every, marks=pytest.mark.exhaustive, id="all")
WORKER = [
    Fault(Kind.DRIVER, What.KILL, 0, Role.WORKER),
    Fault(Kind.DRIVER, What.LOSE, ILLEGAL_ADDRESS, Role.WORKER),
    Fault(Kind.DRIVER, What.LOSE, UNKNOWN, Role.WORKER),  # as after a reset of the driver
    Fault(Kind.DRIVER, What.FAIL, OUT_OF_MEMORY, Role.WORKER),
    Fault(Kind.SOCKET, What.KILL, 0, Role.WORKER),
    Fault(Kind.SOCKET, What.FAIL, errno.EINTR, Role.WORKER),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [PART, ALL])
@pytest.mark.parametrize("fault", WORKER, ids=str)
def test_a_gpu_that_is_lost_at_any_step_is_used_again(
    gpu: Faulty, fault: Fault, steps: Callable[[], Iterator[int]]
) -> None:
    fired = survives(gpu.server, gpu.control, fault, again, steps(), spare=CONNECTED, also=gpu.memory)
    assert 0 < fired < MOST - 1, "there was something to fail, and it passed through in the end"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [PART, ALL])
@pytest.mark.parametrize("fault", WORKER[:4], ids=str)
def test_a_gpu_that_fails_at_any_step_while_it_is_opened_again_is_opened_in_the_end(
    gpu: Faulty, fault: Fault, steps: Callable[[], Iterator[int]]
) -> None:
    """Its process is killed before each step."""

    def scenario(address: str) -> None:
        os.kill(gpu.worker, signal.SIGKILL)
        try:
            again(address)
        except grpc.RpcError as error:
            if gpu.control["armed"] or detail_of(error).rule != "device_lost":  # which the death itself may cause
                raise

    fired = survives(gpu.server, gpu.control, fault, scenario, steps(), spare=CONNECTED)
    assert 0 < fired < MOST - 1, "there was something to fail, and it passed through in the end"


@pytest.mark.extended
@pytest.mark.parametrize("kind", [Kind.DRIVER, Kind.SOCKET], ids=["driver", "socket"])
def test_a_session_of_a_gpu_may_end_at_any_step(gpu: Faulty, kind: Kind) -> None:
    """The client takes its lease back while the device's process is held up in one call after the other."""
    sessions: list[Client] = []

    def scenario(address: str) -> None:
        with at_the_step(gpu.control, lambda: sessions[-1].lease.cancel() if sessions else None):
            on_gpu(address, sessions.append)

    fault = Fault(kind, What.PAUSE, 0, Role.WORKER)
    assert survives(gpu.server, gpu.control, fault, scenario, every(), spare=CONNECTED, also=gpu.memory) > 3

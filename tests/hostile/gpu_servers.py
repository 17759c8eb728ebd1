"""Servers with a GPU: one whose driver is simulated, and the machine's own. Attackers and bystanders of both."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_servers import WAIT_S, healthy
from local_harness import ATTACH, Wire
from rpc_harness import Client, ServerProcess, detail_of, floats, in_buffer
from simulated_gpu import SIMULATED, TAG, built

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp

SERVE = """
import os, sys
from tilewright_server.devices.cuda import discovery
if "TW_SIMULATED_CUDA" in os.environ:
    discovery._LIBRARIES = (os.environ["TW_SIMULATED_CUDA"],)
if "TW_TRUSTING" in os.environ:
    from tilewright_server.engine.planning import quarantine
    quarantine._ENOUGH = float("inf")
from tilewright_tools.cli import main
sys.exit(main(["serve"]))
"""
DEVICE = "cuda:0"
SIDE = 64
STEP = SIDE * SIDE * 4
KINDS = [pytest.param("simulated"), pytest.param("real", marks=pytest.mark.gpu)]


def has_gpu() -> bool:
    if not any(Path("/dev").glob("nvidia[0-9]*")):  # this process may have loaded a simulated driver by its name
        return False
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


class GpuServer(ServerProcess):
    """A server of the service itself whose device is a GPU."""

    real: bool

    @property
    def workers(self) -> list[int]:
        """The processes of its devices."""
        found: list[int] = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children = (task / "children").read_text().split()
                found += [
                    int(pid) for pid in children if b"devices.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
                ]
        return found

    def held(self) -> tuple[int, int]:
        """Descriptors of the device's process, and pieces of the device's memory where those can be counted."""
        (worker,) = self.workers
        pieces = 0 if self.real else len(list(Path("/dev/shm").glob(f"tw{TAG}-*-{worker}-*")))
        return len(list(Path(f"/proc/{worker}/fd").iterdir())), pieces


@contextlib.contextmanager
def gpu_server(
    kind: str, folder: Path, cache: Path, *, quarantined: bool = True, **settings: Any
) -> Iterator[GpuServer]:
    """Skips where there is none of the kind. Without ``quarantined`` kernels are run however often the device was
    lost beside them."""
    command = ["env", *([] if quarantined else ["TW_TRUSTING=1"]), sys.executable, "-c", SERVE]
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("NVIDIA's packages are not installed: pip install 'tilewright[cuda]'")
    if kind == "real":
        if not has_gpu():
            pytest.skip("there is no NVIDIA GPU")
    elif shutil.which("cc") is None:
        pytest.skip("no C compiler (cc)")
    else:
        library = built(SIMULATED / "libcuda.c", folder / "libcuda.so.1")
        driver = {"LD_LIBRARY_PATH": folder, "TW_SIMULATED_CUDA": library, "TW_SIM_TAG": TAG, "TW_SIM_DEVICES": 1}
        command[1:1] = [f"{name}={value}" for name, value in driver.items()]
    try:
        with GpuServer(folder, command, device=DEVICE, cpu_threads=1, cache_dir=cache, **settings) as server:
            server.real = kind == "real"
            assert server.ready, server.log()
            yield server
            assert server.stop() == 0, server.log()[-4000:]
            assert "Traceback" not in server.log(), server.log()[-4000:]
    finally:
        for left in Path("/dev/shm").glob(f"tw{TAG}-*"):
            left.unlink(missing_ok=True)


class OnGpu:
    """A session whose three matrices lie on the device: two of small integers, and one for results."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.buffer = self.create(3 * STEP)
        self.places = [in_buffer(self.buffer, place * STEP) for place in range(3)]
        a, b = np.random.default_rng(1).integers(-4, 5, (2, SIDE, SIDE)).astype(np.float32)  # sums are exact
        self.wanted = a @ b
        data = a.tobytes() + b.tobytes() + bytes(STEP)
        request = mp.WriteBufferRequest(session=client.token, buffer=self.buffer, data=data, bytes=len(data))
        client.memory.WriteBuffer(request, timeout=WAIT_S)
        self.plan = client.dispatch.Plan(self.planned(), timeout=60).plan

    def create(self, nbytes: int) -> int:
        request = mp.CreateBufferRequest(session=self.client.token, bytes=nbytes, device=DEVICE)
        return self.client.memory.CreateBuffer(request, timeout=WAIT_S).buffer

    def free(self, buffer: int) -> None:
        self.client.memory.FreeBuffer(mp.FreeBufferRequest(session=self.client.token, buffer=buffer), timeout=WAIT_S)

    def planned(self) -> dp.PlanRequest:
        inputs = [tp.Operand(name=name, spec=floats(SIDE, SIDE)) for name in "ab"]
        outputs = [tp.Operand(name="out", spec=floats(SIDE, SIDE))]
        selection = dp.Selection(device=DEVICE)
        return dp.PlanRequest(
            session=self.client.token, operation="gemm", inputs=inputs, outputs=outputs, selection=selection
        )

    def execution(self, repeat: int = 0) -> dp.ExecuteRequest:
        execution = dp.Execution(plan=self.plan, locations=self.places, repeat=repeat)
        return dp.ExecuteRequest(session=self.client.token, executions=[execution])

    def result(self) -> np.ndarray:
        request = mp.ReadBufferRequest(session=self.client.token, buffer=self.buffer, offset=2 * STEP, bytes=STEP)
        data = self.client.memory.ReadBuffer(request, timeout=WAIT_S).data
        return np.frombuffer(data, np.float32).reshape(SIDE, SIDE)

    def attached(self) -> Wire:
        """A connection to the device's process."""
        wire = Wire(self.client.opened.local_socket, self.client.token)
        try:
            reply = wire.ask(ATTACH, payload=DEVICE.encode())
            assert reply.error is None, reply.error
        except BaseException:
            wire.close()
            raise
        return wire


def bystander_computes(server: GpuServer) -> None:
    """A newcomer is answered about health, and computes on the GPU over gRPC and over a connection to its process."""
    assert healthy(server.addresses[0])
    with Client(server.addresses[0]) as client:
        gpu = OnGpu(client)
        wanted = gpu.wanted if server.real else np.zeros_like(gpu.wanted)  # simulated kernels write nothing
        (reply,) = client.dispatch.Execute(gpu.execution(), timeout=60).results
        assert not reply.HasField("error"), reply.error
        np.testing.assert_array_equal(gpu.result(), wanted)
        with Wire(client.opened.local_socket, client.token) as control, gpu.attached() as lane:
            binding = control.bind(gpu.plan, *gpu.places)
            assert lane.launch(binding).error is None
        np.testing.assert_array_equal(gpu.result(), wanted)


def another_process_computes(server: GpuServer) -> None:
    """The same, of another process."""
    places = [str(Path(__file__).parent), *sys.path]
    code = f"import sys; sys.path[:0] = {places!r}; from gpu_servers import *; computes_at(sys.argv[1], {server.real})"
    done = subprocess.run(
        [sys.executable, "-c", code, server.addresses[0]], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "computes\n", done.stderr


def computes_at(address: str, real: bool) -> None:
    bystander_computes(_Address(address, real))  # type: ignore[arg-type]
    sys.stdout.write("computes\n")


class _Address:
    def __init__(self, address: str, real: bool) -> None:
        self.addresses, self.real = [address], real


__all__ = [
    "DEVICE",
    "KINDS",
    "SIDE",
    "STEP",
    "GpuServer",
    "OnGpu",
    "another_process_computes",
    "bystander_computes",
    "computes_at",
    "detail_of",
    "gpu_server",
]

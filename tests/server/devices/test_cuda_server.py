"""A whole server on two GPUs whose driver is simulated: each device for itself, and what becomes of the rest."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_harness import ATTACH, BIND, Wire, bind_request, expect
from rpc_harness import Client, ServerProcess, eventually, floats, free_port, in_buffer, refused
from test_cuda_simulated import HERE, TAG, library, pytestmark  # noqa: F401

from tilewright_proto.v1 import dispatch_pb2 as dp
from tilewright_proto.v1 import kernels_pb2 as kp
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_proto.v1 import tensor_pb2 as tp
from tilewright_server.hosting.monitoring.gpus import GpuStates

SERVE = """
import os, sys
from tilewright_server.devices.cuda import discovery
discovery._LIBRARIES = (os.environ["TW_SIMULATED_CUDA"],)
from tilewright_tools.cli import main
sys.exit(main(["serve"]))
"""
SIDE = 64
STEP = SIDE * SIDE * 4
HTTP = free_port()


def management(target: Path, *flags: str) -> Path:
    """The management library of these GPUs."""
    source = HERE / "cuda_simulated" / "libnvidia-ml.c"
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", *flags, "-o", target, source], check=True
    )
    return target


@pytest.fixture(scope="module")
def server(
    library: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
    kernel_cache: Path,
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("gpus")
    driver = {"LD_LIBRARY_PATH": library.parent, "TW_SIMULATED_CUDA": library, "TW_SIM_TAG": TAG, "TW_SIM_DEVICES": 2}
    command = ["env", *(f"{name}={value}" for name, value in driver.items()), sys.executable, "-c", SERVE]
    management(library.with_name("libnvidia-ml.so.1"))
    settings: dict[str, Any] = {"buffer_bytes": 2**50, "cpu_threads": 1, "http_listen": HTTP}
    with ServerProcess(folder, command, cache_dir=kernel_cache, **settings) as process:
        assert process.ready, process.log()
        yield process
        assert process.stop() == 0, process.log()
        assert "Traceback" not in process.log(), process.log()


class Gpu:
    """A session with matrices on one device."""

    def __init__(self, client: Client, device: str) -> None:
        self.client, self.device = client, device
        self.buffer = self.create(3 * STEP)
        self.places = [in_buffer(self.buffer, place * STEP) for place in range(3)]

    def create(self, nbytes: int, **more: Any) -> int:
        request = mp.CreateBufferRequest(session=self.client.token, bytes=nbytes, device=self.device, **more)
        return self.client.memory.CreateBuffer(request).buffer

    def write(self, data: bytes) -> None:
        self.client.memory.WriteBuffer(
            mp.WriteBufferRequest(session=self.client.token, buffer=self.buffer, data=data, bytes=len(data))
        )

    def read(self, nbytes: int) -> bytes:
        request = mp.ReadBufferRequest(session=self.client.token, buffer=self.buffer, bytes=nbytes)
        return bytes(self.client.memory.ReadBuffer(request).data)

    def run(self, places: list[tp.Location] | None = None, device: str = "") -> str:
        """A product of its matrices; the device that it ran on."""
        a, b, out = places or self.places
        request = dp.RunRequest(
            session=self.client.token,
            operation="gemm",
            inputs=[
                tp.Operand(name="a", spec=floats(SIDE, SIDE), location=a),
                tp.Operand(name="b", spec=floats(SIDE, SIDE), location=b),
            ],
            outputs=[tp.Operand(name="out", spec=floats(SIDE, SIDE), location=out)],
            selection=dp.Selection(device=device),
        )
        return str(self.client.dispatch.Run(request).report.device)

    def plan(self) -> int:
        operands = [tp.Operand(name=name, spec=floats(SIDE, SIDE)) for name in ("a", "b")]
        request = dp.PlanRequest(
            session=self.client.token,
            operation="gemm",
            inputs=operands,
            outputs=[tp.Operand(name="out", spec=floats(SIDE, SIDE))],
            selection=dp.Selection(device=self.device),
        )
        return int(self.client.dispatch.Plan(request).plan)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.addresses[0]) as made:
        yield made


@pytest.fixture
def gpus(client: Client) -> tuple[Gpu, Gpu]:
    return Gpu(client, "cuda:0"), Gpu(client, "cuda:1")


def workers(server: ServerProcess) -> set[int]:
    """The processes of the devices."""
    found: list[str] = []
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += (task / "children").read_text().split()
    return {int(pid) for pid in found if b"devices.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.mark.extended
def test_requests_go_to_the_device_that_holds_their_tensors(gpus: tuple[Gpu, Gpu], server: ServerProcess) -> None:
    for gpu in gpus:
        assert gpu.run() == gpu.device
    assert len(workers(server)) == 2
    first, second = gpus
    with refused("invalid_argument", "operand_devices"):
        first.run([*first.places[:2], second.places[2]])
    with refused("invalid_argument", "buffer_device"):
        first.run(device="cuda:1")
    with refused("not_found", "device_id"):
        first.run(device="cuda:2")


def test_memory_that_there_is_not_is_refused_and_the_rest_lives(gpus: tuple[Gpu, Gpu], server: ServerProcess) -> None:
    alive = workers(server)
    for nbytes in (1 << 45, 2**50 + 1, 2**64 - 1):
        for exportable in (False, True):
            with refused("resource_exhausted"):
                gpus[0].create(nbytes, exportable=exportable)
    for gpu in gpus:
        assert gpu.run() == gpu.device
    assert workers(server) == alive


def test_an_output_over_an_input_is_refused_on_a_device(gpus: tuple[Gpu, Gpu]) -> None:
    gpu = gpus[1]
    with refused("invalid_argument"):
        gpu.run([gpu.places[0], gpu.places[1], in_buffer(gpu.buffer, STEP - 256)])
    with refused("invalid_argument", "offset_alignment"):
        gpu.run([gpu.places[0], in_buffer(gpu.buffer, STEP + 2), gpu.places[2]])


def test_a_device_that_is_lost_leaves_the_other_and_the_server_alone(
    gpus: tuple[Gpu, Gpu], client: Client, server: ServerProcess
) -> None:
    first, second = gpus
    for gpu in gpus:
        gpu.run()
    second.write(b"kept")
    victim, other = first.plan(), second.plan()
    both = workers(server)
    with Wire(client.opened.local_socket, client.token) as control:
        bindings = [control.bind(plan, *gpu.places) for plan, gpu in ((victim, first), (other, second))]
        lanes = []
        for gpu in gpus:
            lanes.append(Wire(client.opened.local_socket, client.token))
            assert lanes[-1].ask(ATTACH, payload=gpu.device.encode()).error is None
        for lane, binding in zip(lanes, bindings, strict=True):
            assert lane.launch(binding).error is None
        lost = _oldest(both)
        os.kill(lost, signal.SIGKILL)
        assert lanes[0].is_closed()
        assert lanes[1].launch(bindings[1]).error is None
        assert second.read(4) == b"kept"
        with refused("unavailable", "device_lost") as details:
            first.run()
        assert "make it again" in details[0].fix
        with refused("unavailable", "device_lost"):
            first.read(4)
        expect(control.call(BIND, bind_request(victim, *first.places)), "unavailable", "device_lost")
        again = Gpu(client, "cuda:0")
        assert again.run() == "cuda:0"
        with Wire(client.opened.local_socket, client.token) as fresh:
            assert fresh.ask(ATTACH, payload=b"cuda:0").error is None
            assert fresh.launch(control.bind(victim, *again.places)).error is None
        for lane in lanes:
            lane.close()
    client.memory.FreeBuffer(mp.FreeBufferRequest(session=client.token, buffer=first.buffer))
    assert lost not in workers(server)
    assert len(workers(server)) == 2


def _oldest(pids: set[int]) -> int:
    """The process of the default device, which the server opens when it starts."""
    return min(pids, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[19]))


def test_the_end_of_a_session_frees_its_memory_on_every_device(server: ServerProcess, client: Client) -> None:
    with Client(server.addresses[0]) as other:
        for device in ("cuda:0", "cuda:1"):
            Gpu(other, device).run()
    assert eventually(lambda: client.kernels.Statistics(kp.StatisticsRequest()).buffers == 0)


def test_gpus_tell_their_use_power_and_memory_by_tritons_names(server: ServerProcess) -> None:
    """In its units, of each device by its id; what the management library does not tell of one is left out."""
    pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    with urllib.request.urlopen(f"http://127.0.0.1:{HTTP}/metrics", timeout=60) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line.startswith(("nv_gpu_", "nv_energy_"))]
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        name, uuid, value = line.replace('{gpu_uuid="', " ").replace('"}', "").split(" ")
        found.setdefault(uuid[:8], {})[name] = float(value)
    told = {"nv_gpu_power_limit": 700, "nv_gpu_memory_total_bytes": 150e9, "nv_gpu_memory_used_bytes": 50e9}
    assert found == {
        "GPU-a0a1": {
            **told,
            "nv_gpu_utilization": 0.62,
            "nv_gpu_power_usage": 412.5,
            "nv_energy_consumption": 123456.789,
        },
        "GPU-b0b1": {**told, "nv_gpu_power_usage": 98},
    }


def test_a_management_library_that_hangs_holds_up_no_page_for_long(tmp_path: Path) -> None:
    """The thread in it is the only one, however many pages are made."""
    states = GpuStates(str(management(tmp_path / "libnvidia-ml.so.1", "-DHANG")))
    threads = threading.active_count()
    begun = time.monotonic()
    assert [states.read([("GPU-a0a1", "00000000:01:00.0")]) for _ in range(3)] == [[], [], []]
    assert time.monotonic() - begun < 60
    assert threading.active_count() == threads + 1
    assert GpuStates("libno-such-library.so").read([("GPU-a0a1", "")]) == []

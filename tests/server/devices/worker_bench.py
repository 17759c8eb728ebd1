# ruff: noqa: T201
"""What a device in a process of its own costs: ``python tests/server/devices/worker_bench.py``. Asserts nothing."""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.contract.plan import I64, Geometry, Pointer, Struct, pack
from tilewright_kit.contract.source import SourceUnit
from tilewright_native import include_dir
from tilewright_server.build.cache.artifacts import ArtifactCache
from tilewright_server.build.pool import BuildPool
from tilewright_server.build.toolchains.toolchain import CpuToolchain
from tilewright_server.devices.contract import REPLY, DeviceHost, ProgramStage
from tilewright_server.devices.cpu.provider import CpuProvider
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.engine.call import Call
from tilewright_server.protocol.frames import HEADER, MAX_FRAMES, Kind

UNIT = SourceUnit(
    "nothing",
    "c++",
    '#include "tilewright/cpu/team.h"\n'
    'extern "C" __attribute__((visibility("default"))) void nothing(const void*, tw_team*) {}\n',
    {"main": "nothing"},
)
RUNS = 10_000

Build = Callable[[SourceUnit, ArchSpec], Path]


@contextmanager
def registries(folder: Path) -> Iterator[tuple[Callable[[bool], DeviceRegistry], Build]]:
    cache = ArtifactCache(folder)
    pool = BuildPool(cache, {"c++": CpuToolchain([include_dir()], scratch=cache.scratch)})
    made: list[DeviceRegistry] = []

    def build(unit: SourceUnit, arch: ArchSpec) -> Path:
        pool.submit(unit, arch).wait(Call.within(60))
        artifact = cache.get(pool.key(unit, arch))
        assert artifact is not None
        return artifact.binary

    def make(isolated: bool) -> DeviceRegistry:
        host = DeviceHost(build, {"cpu": {"isolated": isolated}})
        made.append(DeviceRegistry({"cpu": CpuProvider()}, host))
        return made[-1]

    yield make, build
    for registry in made:
        registry.close()
    pool.close()


def microseconds(function: Callable[[], object], count: int = RUNS) -> str:
    times = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        function()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    times.sort()
    return f"median {statistics.median(times):.1f} us, 99 % {times[int(count * 0.99)]:.1f} us"


def measure(device: Any, binary: Path) -> None:
    function = device.load(binary).function("nothing")
    stage = ProgramStage(function, pack(Struct((Pointer("x"), Pointer("y"), Pointer("z"), I64(1)))), Geometry())
    program = device.program([stage], ["x", "y", "z"])
    addresses = [device.allocate(4096).address for _ in range(3)]
    print("  run:        ", microseconds(lambda: program.run(addresses, 0)))
    small, buffer = memoryview(bytearray(4096)), device.allocate(256 << 20)
    print("  4 KiB write:", microseconds(lambda: device.write(buffer, 0, small)))
    large = memoryview(bytearray(256 << 20))
    for name, copy in (("write", device.write), ("read", device.read)):
        copy(buffer, 0, large)
        begin = time.perf_counter()
        copy(buffer, 0, large)
        print(f"  256 MiB {name}: {len(large) / (time.perf_counter() - begin) / 1e9:.1f} GB/s")
    if hasattr(device, "attach"):
        measure_connection(device, program, addresses)


def measure_connection(device: Any, program: Any, addresses: list[int]) -> None:
    client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with client:
        with server:
            device.attach(server.fileno(), 1, lambda: None)
        device.bind(1, 1, program, addresses, 0)
        answered, silent = HEADER.pack(Kind.LAUNCH, REPLY, 0, 0, 1), HEADER.pack(Kind.LAUNCH, 0, 0, 0, 1)

        def launch(packet: bytes) -> None:
            client.send(packet)
            client.recv(64)

        print("  client launch:", microseconds(lambda: launch(answered)))
        full = silent * (MAX_FRAMES - 1) + answered
        begin = time.perf_counter()
        for _ in range(200):
            launch(full)
        print(f"  launches in packets of {MAX_FRAMES}: {200 * MAX_FRAMES / (time.perf_counter() - begin):.0f}/s")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, registries(Path(folder) / "cache") as (make, build):
        for isolated in (False, True):
            registry = make(isolated)
            begin = time.perf_counter()
            device = registry.get("cpu:0")
            print(f"{'another process' if isolated else 'own process'}, opened in {time.perf_counter() - begin:.2f} s")
            measure(device, build(UNIT, device.info.arch))


if __name__ == "__main__":
    main()

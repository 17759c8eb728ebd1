"""The devices of this machine, opened the way the server opens them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewright_arch import ArchSpec
from tilewright_kit.contract.device import Device, DeviceInfo
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.cache.artifacts import Artifact, ArtifactCache
from tilewright_server.build.pool import BuildPool
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain
from tilewright_server.build.toolchains.toolchain import CpuToolchain
from tilewright_server.devices.contract import DeviceHost
from tilewright_server.devices.cpu.provider import CpuProvider
from tilewright_server.devices.registry import DeviceRegistry
from tilewright_server.engine.call import Call

# For the helpers beside the tests, and those of other folders.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("devices", "rpc", "local"))
sys.path.append(str(Path(__file__).parents[2] / "kernels"))

import hip_device_cases
from gpu_device_harness import GPUS, Client, Gpu

Build = Callable[[SourceUnit, ArchSpec], Path]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    cache = ArtifactCache(tmp_path_factory.mktemp("devices") / "cache")
    headers = [include_dir()]
    toolchains = {
        "c++": CpuToolchain(headers, scratch=cache.scratch),
        "cuda": NvrtcToolchain(headers),
        "hip": HipToolchain(headers, scratch=cache.scratch),
    }
    pool = BuildPool(cache, toolchains)
    held: list[Artifact] = []

    def build(unit: SourceUnit, arch: ArchSpec) -> Path:
        try:
            pool.submit(unit, arch).wait(Call.within(60))
        except ToolchainMissingError as missing:
            pytest.skip(f"{missing.reason}: {missing.fix}")
        artifact = cache.get(pool.key(unit, arch))
        assert artifact is not None
        held.append(artifact)
        return artifact.binary

    yield build
    pool.close()
    for artifact in held:
        artifact.release()


class HostedCpuProvider(CpuProvider):
    """The CPU once more, in a process of its own."""

    def hosted(self, host: DeviceHost) -> HostedCpuProvider:
        return HostedCpuProvider(host, "worker")

    def discover(self) -> tuple[DeviceInfo, ...]:
        (info,) = CpuProvider(self.host).discover()
        return (replace(info, id="worker:0", kind="worker", attributes={**info.attributes, "isolated": True}),)


@pytest.fixture
def registry(build: Build) -> Iterator[DeviceRegistry]:
    providers = {
        "cpu": CpuProvider(),
        "worker": HostedCpuProvider(kind="worker"),
        **{name: gpu.provider for name, gpu in GPUS.items()},
    }
    registry = DeviceRegistry(providers, DeviceHost(build))
    yield registry
    registry.close()


KINDS = ["cpu", "worker", *(pytest.param(kind, marks=pytest.mark.gpu) for kind in GPUS)]
"""A kind of device joins the conformance suite here, with a unit for it in ``VECTOR_UNITS``."""


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest, registry: DeviceRegistry) -> Device:
    found = [info for info in registry.infos() if info.kind == request.param]
    if not found:
        problem = GPUS[request.param].provider.search().problem if request.param in GPUS else ""
        pytest.skip(f"this machine has no device of kind {request.param}: {problem}")
    return registry.get(found[0].id)


# GPUs in this process; a module for one kind only has a fixture ``kind`` of its own


@pytest.fixture(scope="module", params=list(GPUS))
def kind(request: pytest.FixtureRequest) -> Gpu:
    return GPUS[request.param]


@pytest.fixture(scope="module")
def info(kind: Gpu) -> DeviceInfo:
    found = kind.provider.discover()
    if not found:
        pytest.skip(f"this machine has no device of kind {kind.kind}: {kind.provider.search().problem}")
    return found[0]


@pytest.fixture(scope="module")
def binary(kind: Gpu, info: DeviceInfo, build: Build) -> Path:
    return build(kind.unit, info.arch)


@pytest.fixture
def gpu(kind: Gpu, info: DeviceInfo) -> Iterator[Any]:
    device = kind.provider.open(info)
    yield device
    device.close()


@pytest.fixture
def entry(gpu: Any, binary: Path) -> Callable[[str], int]:
    return gpu.load(binary).function


@pytest.fixture
def client(kind: Gpu, binary: Path) -> Iterator[Client]:
    client = Client(kind.kind, binary)
    yield client
    client.close()


@pytest.fixture
def loaded(device: Device, build: Build) -> Callable[[str], int]:
    """Entry points of the unit that the suite launches: ``add`` (x, y, out, n) and ``count`` (out: team size and 1 per
    member)."""
    module = device.load(build(VECTOR_UNITS[device.info.kind], device.info.arch))
    return module.function


VECTOR_UNITS = {
    "cpu": SourceUnit(
        "conformance",
        "c++",
        """#include "tilewright/cpu/team.h"
#define TW_ENTRY extern "C" __attribute__((visibility("default"))) void
struct Vectors { const float* x; const float* y; float* out; int64_t n; };
TW_ENTRY add(const void* args, tw_team* team) {
  const Vectors* v = (const Vectors*)args;
  const int64_t end = v->n * (team->rank + 1) / team->size;
  for (int64_t i = v->n * team->rank / team->size; i < end; i++) v->out[i] = v->x[i] + v->y[i];
}
struct Counted { int64_t* out; };
TW_ENTRY count(const void* args, tw_team* team) {
  int64_t* out = ((const Counted*)args)->out;
  __atomic_fetch_add(&out[0], 1, __ATOMIC_RELAXED);
  out[1 + team->rank] = team->size;
  out[1 + team->size + team->rank] = __atomic_add_fetch(&team->state->counters[0].value, 1, __ATOMIC_RELAXED);
}
""",
        {"add": "add", "count": "count"},
    )
}
VECTOR_UNITS["worker"] = VECTOR_UNITS["cpu"]
VECTOR_UNITS["hip"] = hip_device_cases.CONFORMANCE
VECTOR_UNITS["cuda"] = SourceUnit(
    "conformance",
    "cuda",
    """struct Vectors { const float* x; const float* y; float* out; long long n; };
extern "C" __global__ void add(const __grid_constant__ Vectors v) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < v.n; i += step) v.out[i] = v.x[i] + v.y[i];
}
struct Counted { long long* out; };
extern "C" __global__ void count(const __grid_constant__ Counted c) {
  c.out[0] += 1;
  c.out[1] = c.out[2] = 1;
}
""",
    {"add": "add", "count": "count"},
)

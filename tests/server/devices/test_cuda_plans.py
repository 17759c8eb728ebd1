"""Plans of products on the CUDA device: every argument, tensor map and geometry is one that the driver takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_cases import SIMULATED

from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import pack
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.devices.contract import ProgramStage
from tilewright_server.devices.cuda.device import CudaDevice
from tilewright_server.devices.cuda.provider import CudaProvider

pytestmark = pytest.mark.gpu

PROVIDER = CudaProvider()
GEMM = GemmOperation()


def layout(dtype: str, rows: int, cols: int, transposed: bool = False) -> TensorDesc:
    return TensorDesc.of(dtype, (rows, cols), (1, rows)) if transposed else TensorDesc.of(dtype, (rows, cols))


def product(dtype: str, m: int, n: int, k: int, **options: Any) -> OperationRequest:
    transposed = options.pop("columns", True)
    return OperationRequest("gemm", {"a": layout(dtype, m, k), "b": layout(dtype, k, n, transposed)}, {}, options)


PROBLEMS = {
    "large": product("bf16", 4096, 4096, 4096),
    "rows": product("fp16", 512, 768, 256, columns=False),
    "odd": product("fp16", 333, 777, 1111),
    "decode": product("bf16", 8, 4096, 4096),
    "fp8": product("fp8", 1024, 1024, 1024),
    "int8": product("int8", 256, 512, 384),
    "split": product("fp16", 64, 128, 16384, split_k=4),
    **{f"sample {place}": request for place, request in enumerate(GEMM.samples())},
}


@pytest.fixture(scope="module")
def info() -> DeviceInfo:
    found = PROVIDER.discover()
    if not found:
        pytest.skip(f"no NVIDIA GPU: {PROVIDER.search().problem}")
    return found[0]


@pytest.fixture(scope="module")
def gpu(info: DeviceInfo) -> Iterator[CudaDevice]:
    device = CudaDevice.open(info)
    yield device
    device.close()


@pytest.fixture(scope="module")
def built() -> set[Any]:
    """Kernels that problems before have built. A simulated driver runs none, so there is no need for others."""
    return set()


def spread(configs: list[Any], built: set[Any]) -> list[Any]:
    """One of every pipeline, and another; of a simulated driver one of each form of arguments: with tensor maps, and
    with pointers."""
    if SIMULATED:
        known = [config for config in configs if config in built]
        found = list({config.pipeline == "ws": config for config in reversed([*known, *configs])}.values())
    else:
        chosen = {config.pipeline: config for config in reversed(configs)}
        found = list(dict.fromkeys([*chosen.values(), *configs[:1]]))
    built.update(found)
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_driver_takes_what_plans_describe(
    name: str, gpu: CudaDevice, info: DeviceInfo, build: Callable[..., Path], built: set[Any]
) -> None:
    problem = GEMM.parse(PROBLEMS[name])
    configs = [item for item in GEMM.candidates(problem, info) if not GEMM.mismatches(problem, item, info)]
    if not configs:
        pytest.skip("no kernel for this problem on this device")
    for config in spread(configs, built):
        plan = GEMM.plan(problem, config, info)
        if not plan.stages:
            continue
        unit = GEMM.generate(config, info.arch)
        module = gpu.load(build(unit, info.arch))
        stages = [
            ProgramStage(module.function(unit.entries[stage.role]), pack(stage.args), stage.geometry)
            for stage in plan.stages
        ]
        program = gpu.program(stages, [item.name for item in plan.operands], counter_bytes=plan.counter_bytes)
        buffers = [gpu.allocate(item.desc.nbytes) for item in plan.operands]
        scratch = gpu.allocate(plan.workspace_bytes)
        times = program.run([buffer.address for buffer in buffers], scratch.address, repeat=2)
        assert len(times) == len(plan.stages), config.name
        for buffer in (*buffers, scratch):
            gpu.free(buffer)
        program.close()
        module.unload()
    assert SIMULATED or gpu.memory_use()["pool_used"] < info.memory_bytes // 2

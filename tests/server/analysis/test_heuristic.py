"""The GEMM plugin's cost model for AMD GPUs, which has no measurements to go by, against analysis of real kernels."""

from __future__ import annotations

from typing import Any

import pytest

import tilewright_arch
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_tools.analysis.kernels import analyze_config

SIZE = 4096
SHAPES: tuple[tuple[str, str, list[int], list[int]], ...] = (
    ("gfx942", "compv4", [256, 128, 32], [2, 2, 1]),
    ("gfx942", "compv3", [128, 128, 64], [2, 2, 1]),
    ("gfx942", "compv4", [64, 64, 64], [2, 2, 1]),
    ("gfx942", "mem", [32, 64, 64], [1, 4, 1]),
    ("gfx950", "compv4", [128, 128, 64], [2, 2, 1]),
    ("gfx90a", "compv4", [128, 128, 32], [2, 2, 1]),
    ("gfx1100", "compv4", [128, 128, 32], [4, 2, 1]),
    ("gfx1201", "compv4", [128, 128, 32], [4, 2, 1]),
)


@pytest.mark.parametrize(("name", "pipeline", "tile", "wave"), SHAPES)
@pytest.mark.some(2)
def test_it_expects_no_more_than_instructions_allow_and_not_much_less(
    name: str, pipeline: str, tile: list[int], wave: list[int], operation: Operation[Any, Any], toolchain: HipToolchain
) -> None:
    arch = tilewright_arch.load(name)
    config = next(
        item
        for item in operation.kernel_sets["default"].iterate(arch, operation.rules)
        if item.name.startswith(f"gemm_fp16_rcr_{pipeline}_cshuffle")
        and (item.to_dict()["tile"], item.to_dict()["wave"], item.to_dict()["split_k"]) == (tile, wave, 1)
    )
    device = DeviceInfo("hip:0", "hip", arch.description, arch, arch.throughput.units, 0)
    of = TensorDesc.of
    inputs = {"a": of("fp16", (SIZE, SIZE)), "b": of("fp16", (SIZE, SIZE), (1, SIZE))}
    problem = operation.parse(OperationRequest("gemm", inputs))
    expected = operation.predict(problem, config, device).seconds
    bound = analyze_config(operation, config, arch, toolchain, shape=f"{SIZE},{SIZE},{SIZE}").bound.seconds
    assert bound <= expected <= 2 * bound

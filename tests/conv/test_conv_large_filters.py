"""Filters larger than 3x3 on NVIDIA GPUs: what planners propose first compiles. Weights of many taps, and sums of their
gradients, take registers that those of 3x3 do not; no default set has such filters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_grouped_conv.codegen import generate
from tilewright_grouped_conv.pipelines.candidates import conv_candidates
from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.operands import strides_in
from tilewright_grouped_conv.problem.parse import parse_conv
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_native import include_dir
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the packages of the extra `cuda`")

ARCH = tilewright_arch.load("sm_90a")
H200 = DeviceInfo("cuda:0", "cuda", "NVIDIA H200", ARCH, 132, 1 << 37)
LAYERS = {  # channels, channels of a group, size of the image, filter, stride
    "7x7 depthwise": (96, 1, 56, 7, 1),
    "7x7 depthwise strided": (96, 1, 112, 7, 2),
    "5x5 depthwise": (240, 1, 28, 5, 1),
    "5x5 depthwise strided": (96, 1, 112, 5, 2),
    "5x5 groups of 16": (256, 16, 28, 5, 1),
    "5x5 groups of 32": (256, 32, 28, 5, 1),
}


def last(*shape: int) -> TensorDesc:
    """Channels last."""
    return TensorDesc.of("fp16", shape, strides_in(Order.LAST, shape))


def problem_of(layer: tuple[int, ...], direction: Direction) -> ConvProblem:
    channels, of_group, size, taps, stride = layer
    result = (size + 2 * (taps // 2) - taps) // stride + 1
    x, w, y = last(32, channels, size, size), last(channels, of_group, taps, taps), last(32, channels, result, result)
    inputs: dict[str, TensorDesc]
    more: dict[str, tuple[int, ...]]
    if direction is Direction.FORWARD:
        name, inputs, more = "conv", {"x": x, "w": w}, {}
    elif direction is Direction.BACKWARD_DATA:
        name, inputs, more = "conv_backward_data", {"dy": y, "w": w}, {"input_size": (size, size)}
    else:
        name, inputs, more = "conv_backward_weight", {"dy": y, "x": x}, {"filter_size": (taps, taps)}
    sizes = {"groups": channels // of_group, "padding": taps // 2, "stride": stride}
    attributes: dict[str, int | tuple[int, ...]] = {**sizes, **more}
    return parse_conv(OperationRequest(name, inputs, {}, attributes), direction)


@pytest.fixture(scope="module")
def toolchain() -> Iterator[NvrtcToolchain]:
    made = NvrtcToolchain([include_dir()])
    yield made
    made.close()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.some(1)
def test_what_is_proposed_first_compiles(
    name: str, direction: Direction, toolchain: NvrtcToolchain, tmp_path: Path
) -> None:
    first = conv_candidates(problem_of(LAYERS[name], direction), H200)[0]
    assert toolchain.compile(generate(first, ARCH), tmp_path, ARCH).binary.stat().st_size > 0

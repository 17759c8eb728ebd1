"""The model ranks kernels as they were found to rank, and its parts add up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from conv_requests import backward_weight, first, forward, last

import tilewright_arch
from tilewright_grouped_conv.candidates.applicability.tensors import needed_transforms
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.pipelines.candidates import conv_candidates, predict_conv
from tilewright_grouped_conv.plugin import ConvOperation
from tilewright_grouped_conv.problem.parse import parse_conv
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.references.samples import conv_samples
from tilewright_grouped_conv.vocabulary import Direction, Kind
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.selection.measured import Measured
from tilewright_kit.selection.measurements import Measurement, class_of, point_of
from tilewright_kit.selection.strategies import Heuristic

ARCHS = ("x86-64-v4", "gfx942", "gfx1201", "sm_90a")


def best(problem: ConvProblem, device: DeviceInfo) -> ConvConfig:
    return min(conv_candidates(problem, device), key=lambda config: predict_conv(problem, config, device).seconds)


def seconds(problem: ConvProblem, device: DeviceInfo) -> float:
    return predict_conv(problem, best(problem, device), device).seconds


def resnet(n: int, c: int, k: int, size: int, taps: int, groups: int = 1, dtype: str = "fp16") -> ConvProblem:
    tensors = {"x": last(dtype, n, c, size, size), "w": last(dtype, k, c // groups, taps, taps)}
    return forward(tensors, padding=taps // 2, groups=groups)


@pytest.mark.parametrize("name", ARCHS)
def test_predictions_are_positive_and_finite(name: str) -> None:
    device = device_of(tilewright_arch.load(name))
    for direction in Direction:
        for asked in conv_samples(direction):
            problem = parse_conv(asked, direction)
            for config in conv_candidates(problem, device):
                found = predict_conv(problem, config, device)
                assert math.isfinite(found.seconds) and found.seconds > 0
                assert all(math.isfinite(part) and part >= 0 for part in found.parts.values())
    empty = forward({"x": last("fp32", 0, 8, 5, 5), "w": last("fp32", 8, 8, 3, 3)})
    for config in conv_candidates(empty, device):
        assert predict_conv(empty, config, device).seconds > 0


@pytest.mark.parametrize("name", ARCHS)
def test_more_work_takes_longer(name: str) -> None:
    device = device_of(tilewright_arch.load(name))
    times = [seconds(resnet(n, 64, 64, 56, 3), device) for n in (8, 32, 128)]
    assert times == sorted(times) and times[-1] > 8 * times[0] / 4
    assert seconds(resnet(32, 256, 256, 28, 3), device) > seconds(resnet(32, 128, 256, 28, 3), device)


def test_copies_are_counted(device: DeviceInfo) -> None:
    problem = forward({"x": first("fp32", 8, 64, 28, 28), "w": first("fp32", 64, 64, 3, 3)}, padding=1)
    plain = forward({"x": last("fp32", 8, 64, 28, 28), "w": last("fp32", 64, 64, 3, 3)}, padding=1)
    config = conv_candidates(problem, device)[-1]
    assert needed_transforms(problem, config, device)
    assert predict_conv(problem, config, device).parts["copies"] > 0
    assert predict_conv(plain, config, device).parts["copies"] == 0
    assert predict_conv(problem, config, device).seconds > predict_conv(plain, config, device).seconds


def test_on_a_cpu_large_channels_first_images_are_worth_copying(device: DeviceInfo) -> None:
    """Measured: the copies of a 3x3 convolution of 64 channels cost less than gathering lines of pixels."""
    problem = forward({"x": first("fp32", 8, 64, 56, 56), "w": first("fp32", 64, 64, 3, 3)}, padding=1)
    assert not best(problem, device).channels_first
    pointwise = forward({"x": first("fp32", 8, 64, 56, 56), "w": first("fp32", 256, 64, 1, 1)})
    assert best(pointwise, device).channels_first, "a product of matrices reads them as they are"


@pytest.mark.parametrize("name", ARCHS)
def test_depthwise_problems_take_kernels_without_a_product(name: str) -> None:
    device = device_of(tilewright_arch.load(name))
    problem = backward_weight(
        {"x": last("fp16", 16, 128, 56, 56), "dy": last("fp16", 16, 128, 56, 56)},
        groups=128,
        padding=1,
        filter_size=(3, 3),
    )
    found = conv_candidates(problem, device)
    assert {config.kind for config in found} >= {Kind.DEPTHWISE, Kind.IMPLICIT}
    assert best(problem, device).kind is Kind.DEPTHWISE


@pytest.mark.parametrize("name", ["gfx942", "sm_90a"])
def test_large_products_of_gpus_take_large_tiles_and_small_ones_do_not(name: str) -> None:
    device = device_of(tilewright_arch.load(name))
    large, small = best(resnet(64, 256, 256, 28, 3), device), best(resnet(1, 64, 64, 14, 3), device)
    assert large.tile[0] * large.tile[1] >= 112 * 128
    assert small.tile[0] * small.tile[1] <= 64 * 128


class Rows:
    """Measurements, as a strategy reads them."""

    def __init__(self, *rows: Measurement) -> None:
        self.all = rows

    def generation(self) -> object:
        return len(self.all)

    def rows(self, operation: str, arch: str) -> Sequence[Measurement]:
        return [item for item in self.all if (item.operation, item.arch) == (operation, arch)]


def measured(problem: ConvProblem, config: ConvConfig, device: DeviceInfo, us: float) -> Measurement:
    point = point_of(problem)
    arch = device.arch.id
    sizes = dict(point.sizes)
    return Measurement(
        problem.operation, point.signature, sizes, arch, device.name, config.to_dict(), us * 1e3, samples=5
    )


def test_measurements_of_a_convolution_decide_over_the_model() -> None:
    device = device_of(tilewright_arch.load("sm_90a"))
    operation = ConvOperation(Direction.FORWARD)
    problem = resnet(32, 128, 128, 28, 3)
    order = Heuristic().rank(operation, problem, operation.candidates(problem, device), device)
    slow, fast = order[0].config, order[-1].config
    assert isinstance(slow, ConvConfig) and isinstance(fast, ConvConfig)
    rows = Rows(measured(problem, slow, device, 90.0), measured(problem, fast, device, 30.0))
    again = Measured([rows]).rank(operation, problem, operation.candidates(problem, device), device)
    assert again[0].config == fast and "measured" in again[0].reason
    larger = resnet(48, 128, 128, 28, 3)
    carried = Measured([rows]).rank(operation, larger, operation.candidates(larger, device), device)
    assert "1 measured problems near it" in carried[0].reason


def test_measurements_are_not_carried_to_other_filters() -> None:
    signatures = {
        class_of(point_of(resnet(32, 128, 128, 28, taps)).signature) for taps in (1, 3)
    }  # fmt: skip
    assert len(signatures) == 2
    same = {class_of(point_of(resnet(n, c, 64, 28, 3)).signature) for n, c in ((1, 64), (32, 256))}
    assert len(same) == 1

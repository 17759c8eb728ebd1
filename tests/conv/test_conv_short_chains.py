"""Sums of fp32 are made of short chains where a convolution is not such as networks have: rounding adds little."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path

import numpy as np
import pytest
from conv_cases import Case
from conv_runner import Array, ConvRunner, compiler
from conv_truth import CONVS, Planned, planned
from cpu_kernels import as_servers_build

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.numerics.compare import relative_error, unit_roundoff
from tilewright_kit.types.dtypes import DType

FWD, DATA, WEIGHT = Direction
UNIT = unit_roundoff(DType.FP32)
ODD = (
    Case(1, 9, 9, 1, (31, 29), (2, 2), stride=(3, 3)),
    Case(3, 47, 9, 1, (15, 29), (5, 2), padding=(0, 2, 0, 2), dilation=(2, 1)),
    Case(2, 20, 46, 2, (24, 19), (5, 2), padding=(2, 0, 2, 0)),
    Case(2, 13, 7, 1, (9, 7, 5), (3, 2, 3), padding=(1, 0, 1, 1, 0, 1)),
    Case(1, 60, 60, 3, (90,), (5,), padding=(2, 2)),
    Case(2, 55, 35, 5, (12, 21), (3, 3), padding=(1, 1, 1, 1)),
)
SHAPES, DRAWS = 200, 20
"""Of the sweep against PyTorch, and how often inputs are drawn for a shape that looks near the limit: a single ratio is
as much chance as rule where results are few, or sums of few terms (0.8 to 1.7 for the same shape of 24 results).
"""
NEAR, LIMIT = 1.1, 1.2
"""Our error over its error in one draw, from which on a shape is looked at; and the ratio of the root mean squares over
all draws, at most.
"""


def bound(terms: int) -> float:
    """Relative error, in norm, of sums of random terms in chains of 16: each addition rounds by up to half a unit, at
    random, so that variances add up to (16 + terms / 16) / 2 of a third of its square; and a half more.
    """
    return UNIT * math.sqrt(1.5 * (16 + terms / 16) / 6)


def error_of(runner: ConvRunner, item: Planned, seed: int) -> float:
    inputs = item.draw(seed)
    result = runner.run(item.plan, inputs)[item.output].view
    return relative_error(result, CONVS[item.problem.operation].reference(item.problem, inputs)[item.output])


@pytest.mark.parametrize("case", ODD, ids=str)
@pytest.mark.parametrize("direction", [FWD, DATA], ids=str)
@pytest.mark.some(6)
def test_errors_are_those_of_short_chains(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction, case: Case
) -> None:
    item = planned(case.request(direction, "fp32"), device)
    channels = (case.c if direction is FWD else case.k) // case.groups
    for seed in range(3):
        assert error_of(conv_runner, item, seed) < bound(channels * math.prod(case.filter))


@pytest.fixture(scope="module")
def shipped(cpu: ArchSpec, kernel_folder: Path) -> ConvRunner:
    """Kernels as servers build them: how often they round is what is measured."""
    folder = kernel_folder / "shipped"
    folder.mkdir(exist_ok=True)
    return ConvRunner(cpu, compiler(), folder, as_servers_build(cpu))


def odd_case(rng: random.Random) -> Case:
    """A convolution of odd filter, stride and padding, mostly of odd channels, that has a result."""
    channels = (3, 5, 7, 8, 9, 11, 13, 16, 17, 20, 24, 29, 33, 47, 64)
    while True:
        ndim, groups = rng.choice((1, 2, 2, 2, 3)), rng.choice((1, 1, 2, 3, 5))
        size = tuple(rng.randrange(5, (90, 33, 13)[ndim - 1]) for _ in range(ndim))
        taps, stride, dilation, padding = (
            tuple(rng.choice(values) for _ in range(ndim))
            for values in ((1, 2, 3, 3, 5), (1, 1, 2, 3), (1, 1, 2), (0, 1, 2))
        )
        case = Case(
            rng.choice((1, 2, 3)), groups * rng.choice(channels), groups * rng.choice(channels), groups, size, taps,
            stride, dilation, padding * 2,
        )  # fmt: skip
        if min(case.output) > 0 and all((t - 1) * d < s for t, d, s in zip(taps, dilation, size, strict=True)):
            return case


def peer(case: Case, direction: Direction, inputs: dict[str, Array]) -> Array:
    """PyTorch's result."""
    import torch

    words = (list(case.stride), list(case.padding[: case.ndim]), list(case.dilation))
    zeros = {name: torch.zeros(case.shapes()[name]) for name in ("x", "w", "dy")}
    given = zeros | {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}
    if direction is FWD:
        theirs = (torch.conv1d, torch.conv2d, torch.conv3d)[case.ndim - 1]
        result = theirs(given["x"], given["w"], None, *words, case.groups)
    else:
        wanted = [direction is DATA, direction is WEIGHT, False]
        result = torch.ops.aten.convolution_backward(
            given["dy"], given["x"], given["w"], None, *words, False, [0] * case.ndim, case.groups, wanted
        )[0 if direction is DATA else 1]
    return np.asarray(result.numpy())


def ratio_of(runner: ConvRunner, item: Planned, case: Case, direction: Direction, seeds: range) -> float:
    """Our error over PyTorch's, each the root mean square over draws."""
    ours, theirs = 0.0, 0.0
    for seed in seeds:
        inputs = item.draw(seed)
        truth = CONVS[item.problem.operation].reference(item.problem, inputs)[item.output]
        ours += relative_error(runner.run(item.plan, inputs)[item.output].view, truth) ** 2
        theirs += relative_error(peer(case, direction, inputs), truth) ** 2
    return math.sqrt(ours / theirs) if theirs else float(ours > 0)


@pytest.mark.torch
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("direction", [FWD, DATA, WEIGHT], ids=str)
def test_errors_of_odd_shapes_are_hardly_above_those_of_pytorch(
    shipped: ConvRunner, device: DeviceInfo, direction: Direction
) -> None:
    """On one thread, where it takes the ways that sum most carefully."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rng = random.Random(1)
    above = {}
    try:
        for number in range(SHAPES):
            case = odd_case(rng)
            item = planned(case.request(direction, "fp32"), device)
            if ratio_of(shipped, item, case, direction, range(number, number + 1)) > NEAR:
                ratio = ratio_of(shipped, item, case, direction, range(DRAWS))
                if ratio > LIMIT:
                    above[case] = ratio
    finally:
        torch.set_num_threads(before)
    assert not above

"""Sums of fp32 are made of short chains where a convolution is not such as networks have: rounding adds little."""

from __future__ import annotations

import importlib.util
import math
import random

import pytest
from conv_cases import Case
from conv_runner import ConvRunner
from conv_truth import CONVS, Planned, planned

from tilewright_grouped_conv.words import Direction
from tilewright_kit.compare import relative_error, unit_roundoff
from tilewright_kit.device import DeviceInfo
from tilewright_kit.dtypes import DType

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
SHAPES, LIMIT, FEW = 200, 1.2, 1.4
"""Of the sweep against PyTorch; our error over its error, at most; and that of a few shapes: where sums have few terms,
as in gradients of strided convolutions, or results few elements.
"""
ABOVE = {FWD: 0, DATA: 10, WEIGHT: 20}
"""How many such shapes there may be."""


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
def test_errors_are_those_of_short_chains(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction, case: Case
) -> None:
    item = planned(case.request(direction, "fp32"), device)
    channels = (case.c if direction is FWD else case.k) // case.groups
    for seed in range(3):
        assert error_of(conv_runner, item, seed) < bound(channels * math.prod(case.filter))


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


@pytest.mark.torch
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("direction", [FWD, DATA, WEIGHT], ids=str)
def test_errors_of_odd_shapes_are_hardly_above_those_of_pytorch(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction
) -> None:
    """On one thread, where it takes the ways that sum most carefully."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rng = random.Random(1)
    above = []
    try:
        for seed in range(SHAPES):
            case = odd_case(rng)
            item = planned(case.request(direction, "fp32"), device)
            inputs = item.draw(seed)
            ours = conv_runner.run(item.plan, inputs)[item.output].view
            truth = CONVS[item.problem.operation].reference(item.problem, inputs)[item.output]
            words = (list(case.stride), list(case.padding[: case.ndim]), list(case.dilation))
            x, w, dy = (torch.zeros(case.shapes()[name]) for name in ("x", "w", "dy"))
            given = {"x": x, "w": w, "dy": dy} | {name: torch.from_numpy(a.copy()) for name, a in inputs.items()}
            if direction is FWD:
                theirs = torch.conv2d if case.ndim == 2 else torch.conv1d if case.ndim == 1 else torch.conv3d
                peer = theirs(given["x"], given["w"], None, *words, case.groups)
            else:
                wanted = [direction is DATA, direction is WEIGHT, False]
                both = torch.ops.aten.convolution_backward(
                    given["dy"], given["x"], given["w"], None, *words, False, [0] * case.ndim, case.groups, wanted
                )
                peer = both[0 if direction is DATA else 1]
            mine, other = relative_error(ours, truth), relative_error(peer.numpy(), truth)
            if mine > LIMIT * other:
                above.append((case, mine / other))
    finally:
        torch.set_num_threads(before)
    assert all(ratio < FEW for _, ratio in above)
    assert len(above) <= ABOVE[direction]

"""Sweeps of convolutions: shapes as people write them, requests that the operation takes, and wrong results found in
large problems as well as in small ones.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright_arch
from tilewright_grouped_conv.commands.cases import ConvCase
from tilewright_grouped_conv.commands.command import COMMAND
from tilewright_grouped_conv.commands.family import CONV
from tilewright_grouped_conv.plugin import ConvOperation
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import Role
from tilewright_kit.numerics.compare import poison
from tilewright_kit.numerics.contents import contents, view
from tilewright_kit.selection.measurements import point_of
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError
from tilewright_tools.tuning import evaluate
from tilewright_tools.tuning.measure import check, peer
from tilewright_tools.tuning.measure.check import Truth
from tilewright_tools.tuning.measure.timing import TimingOptions
from tilewright_tools.tuning.problems.families import family_of, stored_case
from tilewright_tools.tuning.problems.shapes import read_shapes
from tilewright_tools.tuning.results import Output, Result, Stamp

DEVICE = device_of(tilewright_arch.load("x86-64-v3"))
OPERATIONS = {operation.name: operation for operation in map(ConvOperation, Direction)}
EVERY = {
    "direction": ("fwd", "bwd_data", "bwd_weight"),
    "dtype": ("fp32",),
    "layout": ("channels_last", "channels_first"),
}
CASES = [
    case
    for row in (
        ConvCase(3, 6, 10, "9x7", "3", "1", "1", groups=2),
        ConvCase(2, 7, 9, "8x9", "3x2", "2x1", "0x1-1x0", "1x2", dtype="fp16"),
        ConvCase(2, 12, 12, "10x9", "3", "2", "1", groups=12, dtype="bf16", layout="channels_first"),
        ConvCase(3, 5, 8, "17", "5", "3", "2"),
        ConvCase(2, 8, 6, "5x4x6", "2x1x3", "1", "1x0x1", groups=2),
    )
    for case in (replace(row, direction=direction) for direction in EVERY["direction"])
]
FUSED = [
    ConvCase(3, 6, 10, "9x7", "3", "1", "1", bias="yes", activation="Gelu", d=1, scale="channel"),
    ConvCase(3, 12, 8, "9x7", "3", groups=4, bias="fp32", activation="Relu", dtype="bf16"),
    ConvCase(3, 6, 8, "9x7", "3", groups=2, accumulate="yes", direction="bwd_data"),
    ConvCase(3, 6, 8, "9x7", "3", accumulate="yes", direction="bwd_weight"),
    ConvCase(3, 6, 8, "9x7", "3", dtype="int8"),
    ConvCase(3, 6, 8, "9x7", "3", dtype="mixed", out_dtype="bf16"),
]


class JudgedConv:
    """A problem, its truth and a right output; ``large`` has it judged as large problems are."""

    def __init__(self, case: ConvCase, monkeypatch: pytest.MonkeyPatch, *, large: bool, budget: int = 1 << 28) -> None:
        monkeypatch.setattr(check, "WHOLE", 0 if large else 1 << 40)
        monkeypatch.setattr(check, "PART", budget)
        request = case.request()
        operation = OPERATIONS[request.operation]
        self.problem = operation.parse(request)
        assert self.problem.flops == case.flops
        rng = np.random.default_rng(7)
        inputs = {
            item.name: view(contents(item.desc, "normal", rng), item.desc)
            for item in self.problem.operands
            if item.role is Role.INPUT
        }
        self.truth = Truth(operation, self.problem, case, inputs, DEVICE, rng)
        assert self.truth.is_whole is not large
        (self.name, self.desc) = next((i.name, i.desc) for i in self.problem.operands if i.role is Role.OUTPUT)
        exact = operation.reference(self.problem, inputs)[self.name]
        self.right = self._laid_out(exact.astype(self.desc.dtype.numpy))
        self.poison = self._laid_out(poison(self.desc.dtype, self.desc.shape))

    def _laid_out(self, array: Any) -> Any:
        made = view(np.zeros(self.desc.span, self.desc.dtype.numpy), self.desc)
        made[...] = array
        return made

    def reason(self, out: Any) -> str:
        return self.truth.check({self.name: self._laid_out(out)}, {self.name: self.poison}).reason


@pytest.mark.parametrize("budget", [1 << 28, 0], ids=["roomy", "tight"])
@pytest.mark.parametrize("large", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("case", [*CASES, *FUSED], ids=lambda case: case.label)
def test_a_right_convolution_passes_and_an_unwritten_one_does_not(
    case: ConvCase, large: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = JudgedConv(case, monkeypatch, large=large, budget=budget)
    assert judged.reason(judged.right) == ""
    assert judged.reason(judged.poison)
    assert judged.reason(np.zeros_like(judged.right))
    assert judged.reason(judged.right * judged.right.dtype.type(2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_one_wrong_element_anywhere_in_a_large_convolution_is_found(
    case: ConvCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = JudgedConv(case, monkeypatch, large=True, budget=0)
    size = np.abs(judged.right.astype(np.float64)).max()
    rng = np.random.default_rng(1)
    for _ in range(12):
        place = tuple(int(rng.integers(extent)) for extent in judged.right.shape)
        out = judged.right.copy()
        out[place] = -float(out[place]) - np.copysign(size / 2, float(out[place]))
        assert judged.reason(out), place


@pytest.mark.parametrize("name", CONV.named)
def test_every_listed_layer_is_a_problem_that_the_operation_takes(name: str) -> None:
    cases = read_shapes(CONV, name, EVERY)
    assert len(cases) == 6 * len(CONV.named[name])
    for case in cases:
        request = case.request()
        problem = OPERATIONS[request.operation].parse(request)
        assert problem.flops == case.flops
        assert problem.channels_first is (case.layout == "channels_first") or case.filters == (1,) * case.ndim


def test_shapes_are_written_as_sizes_and_options_in_any_order(tmp_path: Path) -> None:
    assert read_shapes(CONV, "32x64x128x56x57:3x1s2p1x0d1g32,1x2x3x9:4g1p0-2") == [
        ConvCase(32, 64, 128, "56x57", "3x1", "2", "1x0", groups=32), ConvCase(1, 2, 3, "9", "4", padding="0-2"),
    ]  # fmt: skip
    file = tmp_path / "layers.csv"
    file.write_text("n,c,k,size,filter,direction\n2,4,6,5x5,3,bwd_weight\n2,4,6,5x5,3,\n")
    assert read_shapes(CONV, str(file), {"direction": ("fwd", "bwd_data")}) == [
        ConvCase(2, 4, 6, "5x5", "3", direction="bwd_weight"), ConvCase(2, 4, 6, "5x5", "3"),
        ConvCase(2, 4, 6, "5x5", "3", direction="bwd_data"),
    ]  # fmt: skip
    file.write_text("2,4,6,5x5,3,1,1,2\n")
    assert read_shapes(CONV, str(file)) == [ConvCase(2, 4, 6, "5x5", "3", "1", "1", groups=2)]


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("1x4x6x5x5:3g4", "shapes.k", "multiple"),
        ("1x5x6x5x5:3g3", "shapes.c", "multiple"),
        ("1x4x6x5x5:7", "shapes.filter", "larger"),
        ("1x4x6x5x5:3x3x3", "shapes.filter", "2 spatial axes"),
        ("1x4x6x5x5:3p1-1x1x1", "shapes.padding", "2 spatial axes"),
        ("0x4x6x5x5:3", "shapes.n", "at least 1"),
        ("1x4x6x5x5:3s0", "shapes.stride", "positive"),
        ("no_such_list", "shapes", "resnet50"),
    ],
)
def test_a_convolution_that_cannot_be_meant_is_refused(text: str, field: str, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_shapes(CONV, text)
    assert caught.value.field == field
    assert says in str(caught.value)
    assert caught.value.fix


def test_a_row_of_results_says_which_operations_problem_it_holds() -> None:
    for case in CASES:
        operation = case.request().operation
        assert family_of(operation) is CONV
        assert stored_case(case.to_dict() | {"kernel": "x"}, "row", operation) == case
    with pytest.raises(NotFoundError, match="no command knows problems"):
        family_of("sorting")


def test_strategies_are_judged_for_each_direction_of_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.csv"
    with Output(path) as output:
        for size in ("28x28", "29x29", "40x40"):
            for case in (ConvCase(2, 64, 64, size, "3", padding="1", direction=way) for way in EVERY["direction"]):
                for item in results_of(case):
                    output.add(item)
    assert evaluate.main([str(path), "--units", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(":")] == [f"{name}:" for name in OPERATIONS]
    assert sum(line.startswith("heuristic") for line in lines) == 3


def results_of(case: ConvCase) -> list[Result]:
    """As if the model's favourites were the fastest."""
    operation = OPERATIONS[case.operation]
    problem = operation.parse(case.request())
    point = point_of(problem)
    stamp = Stamp(operation.name, DEVICE.arch.id, DEVICE.name)
    return [
        Result(
            case, config.name, config.to_dict(), "ok", place=place, median_ns=1e4 * place, samples=9,
            flops=problem.flops, signature=point.signature, sizes=dict(point.sizes), date="2026-11-20T12:00:00Z",
            stamp=stamp, key=str(config.key(DEVICE.arch.id)),
        )
        for place, config in enumerate(operation.candidates(problem, DEVICE)[:3], 1)
    ]  # fmt: skip


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("case", [case for case in CASES if "-" not in case.padding], ids=lambda case: case.label)
def test_the_peer_computes_the_same_convolution(case: ConvCase) -> None:
    import torch

    operation = OPERATIONS[case.request().operation]
    problem = operation.parse(case.request())
    rng = np.random.default_rng(0)
    inputs = {
        item.name: view(contents(item.desc, "normal", rng), item.desc)
        for item in problem.operands
        if item.role is Role.INPUT
    }
    (want,) = operation.reference(problem, inputs).values()
    out: Any = CONV.peer_call(torch, case, {k: peer._tensor(torch, a, "cpu") for k, a in inputs.items()})()
    assert np.linalg.norm(out.double().numpy() - want) <= 2e-2 * np.linalg.norm(want)
    timing, note = peer.time_peer("torch", DEVICE, case, inputs, TimingOptions(warmup=1, repeat=2, seconds=0.02), 1)
    assert (note, timing is not None) == ("", True)


def test_the_peer_says_so_where_pads_differ() -> None:
    with pytest.raises(NotImplementedError, match="before and behind"):
        CONV.peer_call(None, ConvCase(1, 2, 3, "9", "4", padding="0-2"), {})


def test_transposed_convolutions_are_rows_too() -> None:
    """Sizes are those of the input, as of `run conv --transposed`."""
    (case,) = read_shapes(CONV, "1x64x32x28x28:4s2p1", {"direction": ("transposed",), "bias": ("yes",)})
    assert case == COMMAND.case(
        {"n": 1, "c": 64, "k": 32, "size": "28x28", "filter": "4", "stride": "2", "padding": "1", "transposed": True,
         "bias": True}
    )  # fmt: skip
    assert case.direction == "bwd_data"
    assert case.sizes == (56, 56)
    assert stored_case(case.to_dict(), "row", "conv_backward_data") == case

"""Sweeps of attention: gradients and pages are problems like others, and wrong results are found in large ones too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright_arch
from tilewright_fmha.commands.cases import DIRECTIONS, AttentionCase
from tilewright_fmha.commands.family import ATTENTION
from tilewright_fmha.plugin import tilewright_operations
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import Role
from tilewright_kit.numerics.compare import poison
from tilewright_kit.numerics.contents import contents, view
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_tools.tuning.measure import check
from tilewright_tools.tuning.measure.check import Truth
from tilewright_tools.tuning.problems.families import family_of, stored_case
from tilewright_tools.tuning.problems.shapes import read_shapes

DEVICE = device_of(tilewright_arch.load("x86-64-v3"))
OPERATIONS = {operation.name: operation for operation in tilewright_operations()}
CASES = [
    AttentionCase(2, 4, 29, 32, heads_k=2),
    AttentionCase(2, 4, 29, 32, seq_q=5, mask="bottom_right", layout="bshd", lse="yes"),
    AttentionCase(3, 4, 29, 24, seq_q=1, heads_k=2, page=8),
    AttentionCase(2, 4, 29, 32, heads_k=2, direction="bwd"),
    AttentionCase(2, 2, 19, 16, seq_q=23, hdim_v=24, mask="top_left", direction="bwd", layout="bshd"),
    AttentionCase(1, 2, 40, 16, window="3,0", direction="bwd", dtype="bf16"),
]


class Judged:
    """A problem, its truth and right outputs; ``large`` has it judged as large problems are."""

    def __init__(self, case: AttentionCase, monkeypatch: pytest.MonkeyPatch, *, large: bool) -> None:
        monkeypatch.setattr(check, "WHOLE", 0 if large else 1 << 40)
        request = case.request()
        operation = OPERATIONS[request.operation]
        problem = operation.parse(request)
        assert case.page or problem.flops == case.flops
        rng = np.random.default_rng(7)
        inputs = {
            item.name: view(contents(item.desc, "normal", rng), item.desc)
            for item in problem.operands
            if item.role is Role.INPUT
        }
        ATTENTION.settle(case, inputs, rng)
        self.truth = Truth(operation, problem, case, inputs, DEVICE, rng)
        assert self.truth.is_whole is not large
        self.descs = {item.name: item.desc for item in problem.operands if item.role is Role.OUTPUT}
        exact = operation.reference(problem, inputs)
        self.right = {name: exact[name].astype(desc.dtype.numpy) for name, desc in self.descs.items()}
        self.poison = {name: poison(desc.dtype, desc.shape) for name, desc in self.descs.items()}

    def reason(self, **changed: Any) -> str:
        return self.truth.check(self.right | changed, self.poison).reason


@pytest.mark.parametrize("large", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_right_outputs_pass_and_each_wrong_one_is_found(
    case: AttentionCase, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Judged(case, monkeypatch, large=large)
    assert judged.reason() == ""
    for name in judged.right:
        assert judged.reason(**{name: judged.poison[name]}), name
        if name != "lse" or not large:
            assert judged.reason(**{name: np.zeros_like(judged.right[name])}), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_what_is_not_free_has_a_meaning(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged(case, monkeypatch, large=True)
    assert all(np.isfinite(item.astype(np.float32)).all() for item in judged.right.values())


def test_directions_and_pages_are_columns() -> None:
    found = read_shapes(ATTENTION, "1x4/2x1/64x32", {"direction": ("fwd",), "page": ("0", "16")})
    assert [case.page for case in found] == [0, 16]
    for case in CASES:
        operation = case.request().operation
        assert operation == DIRECTIONS[case.direction]
        assert family_of(operation) is ATTENTION
        assert stored_case(case.to_dict() | {"kernel": "x"}, "row", operation) == case
    with pytest.raises(InvalidArgumentError, match="end to end"):
        read_shapes(ATTENTION, "1x4x64x32", {"varlen": ("yes",)})
    with pytest.raises(InvalidArgumentError, match="no gradients of pages"):
        read_shapes(ATTENTION, "1x4x64x32", {"direction": ("bwd",), "page": ("16",)})

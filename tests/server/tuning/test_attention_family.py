"""Sweeps of attention: gradients and pages are problems like others, and wrong results are found in large ones too."""

from __future__ import annotations

import importlib.util
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
from tilewright_tools.tuning.measure import check, peer
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
    AttentionCase(1, 2, 40, 16, seq_q=7, window="3,0", sink_size=5, mask="bottom_right"),
    AttentionCase(3, 4, 29, 32, seq_q=7, heads_k=2, varlen="yes", dropout="0.2", bias="alibi", lse="yes"),
    AttentionCase(2, 2, 29, 16, seq_q=7, page=8, varlen="yes", sinks="yes", mask="bottom_right"),
    AttentionCase(2, 2, 29, 16, seq_q=7, varlen="yes", scores="masked", mask="bottom_right"),
    AttentionCase(2, 4, 19, 16, seq_q=23, heads_k=2, varlen="yes", direction="bwd", dropout="0.2", bias="yes"),
]
APPENDED = [
    AttentionCase(3, 4, 29, 32, seq_q=3, heads_k=2, direction="append", rope="half"),
    AttentionCase(2, 2, 29, 16, seq_q=3, direction="append", page=8, rope="interleaved", dtype="bf16"),
    AttentionCase(2, 2, 29, 16, seq_q=3, direction="append", dtype="fp8", descale="yes"),
]


class Judged:
    """A problem, its truth and right outputs; ``large`` has it judged as large problems are."""

    def __init__(self, case: AttentionCase, monkeypatch: pytest.MonkeyPatch, *, large: bool) -> None:
        monkeypatch.setattr(check, "WHOLE", 0 if large else 1 << 40)
        request = case.request()
        operation = OPERATIONS[request.operation]
        problem = operation.parse(request)
        assert case.page or case.direction == "append" or problem.flops == case.flops
        rng = np.random.default_rng(7)
        inputs = {
            item.name: view(contents(item.desc, "normal", rng), item.desc)
            for item in problem.operands
            if item.role is Role.INPUT
        }
        ATTENTION.settle(case, inputs, rng)
        self.truth = Truth(operation, problem, case, inputs, DEVICE, rng)
        assert self.truth.is_whole is not (large and case.flops)
        self.descs = {item.name: item.desc for item in problem.operands if item.role is Role.OUTPUT}
        exact = operation.reference(problem, inputs)
        self.right = {name: exact[name].astype(desc.dtype.numpy) for name, desc in self.descs.items()}
        self.poison = {name: poison(desc.dtype, desc.shape) for name, desc in self.descs.items()}

    def reason(self, **changed: Any) -> str:
        return self.truth.check(self.right | changed, self.poison).reason


@pytest.mark.parametrize("large", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("case", [*CASES, *APPENDED], ids=lambda case: case.label)
def test_right_outputs_pass_and_each_wrong_one_is_found(
    case: AttentionCase, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Judged(case, monkeypatch, large=large)
    assert judged.reason() == ""
    for name in judged.right:
        assert judged.reason(**{name: judged.poison[name]}), name
        assert judged.reason(**{name: np.zeros_like(judged.right[name])}), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_what_is_not_free_has_a_meaning(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged(case, monkeypatch, large=True)
    assert not any(np.isnan(item.astype(np.float32)).any() for item in judged.right.values())
    assert all(np.isfinite(item.astype(np.float32)).all() for name, item in judged.right.items() if name != "scores")


def test_directions_and_pages_are_columns() -> None:
    found = read_shapes(ATTENTION, "1x4/2x1/64x32", {"direction": ("fwd",), "page": ("0", "16")})
    assert [case.page for case in found] == [0, 16]
    for case in (*CASES, *APPENDED):
        operation = case.request().operation
        assert operation == DIRECTIONS[case.direction]
        assert family_of(operation) is ATTENTION
        assert stored_case(case.to_dict() | {"kernel": "x"}, "row", operation) == case
    found = read_shapes(ATTENTION, "1x4x64x32", {"varlen": ("no", "yes"), "dropout": ("0.1",)})
    assert [case.is_varlen for case in found] == [False, True]
    with pytest.raises(InvalidArgumentError, match="no gradients of pages"):
        read_shapes(ATTENTION, "1x4x64x32", {"direction": ("bwd",), "page": ("16",)})


@pytest.mark.parametrize("case", APPENDED, ids=lambda case: case.label)
def test_of_a_cache_the_new_rows_count(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of a sweep are full, but for the rows that are appended."""
    judged = Judged(case, monkeypatch, large=False)
    right, poisoned = judged.right["k_cache"], judged.poison["k_cache"]
    rows = judged.truth._defined("k_cache", right)
    assert rows.shape[:2] == (case.batch * case.queries, case.kv_heads)
    written = poisoned.copy()
    if case.page:  # what a kernel writes that leaves the rest alone
        for item, places in enumerate([np.arange(case.seq_k - case.queries, case.seq_k)] * case.batch):
            pages = judged.truth._inputs["block_table"][item][places // case.page]
            written[pages, places % case.page] = right[pages, places % case.page]
    else:
        written[:, :, -case.queries :] = right[:, :, -case.queries :]
    assert judged.reason(k_cache=written) == ""
    assert judged.reason(k_cache=poisoned)


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(2, 4, 29, 32, heads_k=2, bias="both", mask="bottom_right", seq_q=7),
        AttentionCase(2, 4, 29, 32, heads_k=2, softcap="9", sinks="yes", scale="0.3", window="5,2"),
        AttentionCase(2, 2, 19, 16, seq_q=23, varlen="yes", bias="alibi", mask="top_left"),
        AttentionCase(2, 2, 29, 16, window="2,0", sink_size=3),
        *APPENDED,
    ],
    ids=lambda case: case.label,
)
def test_the_peer_computes_what_we_do(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    judged = Judged(case, monkeypatch, large=False)
    operands = {name: peer._tensor(torch, array, "cpu") for name, array in judged.truth._inputs.items()}
    found = ATTENTION.peer_call(torch, case, operands)()
    if case.direction == "append":
        for name in ("k", "v"):
            have = operands[f"{name}_past"].float().numpy()
            want = judged.right[f"{name}_cache"].astype(np.float32)
            assert np.linalg.norm(have - want) <= 0.02 * np.linalg.norm(want), name
        return
    assert isinstance(found, torch.Tensor)
    out = found.double().transpose(1, 2).flatten(0, 1) if case.is_varlen else found.double()
    assert np.linalg.norm(out.numpy() - judged.right["o"]) <= 1e-5 * np.linalg.norm(judged.right["o"])

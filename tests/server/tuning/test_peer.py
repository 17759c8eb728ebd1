"""The peer computes the same product, or says why it does not."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewright_arch
from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_gemm.commands.family import GEMM
from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import Role
from tilewright_kit.numerics.contents import contents, view
from tilewright_kit.types.errors import UnsupportedError
from tilewright_tools.tuning.measure import peer
from tilewright_tools.tuning.measure.timing import TimingOptions

DEVICE = device_of(tilewright_arch.load("x86-64-v3"))
QUICK = TimingOptions(warmup=1, repeat=3, seconds=0.05)


def inputs_of(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    operands = GemmOperation().parse(case.request()).operands
    return {
        item.name: view(contents(item.desc, "normal", rng), item.desc) for item in operands if item.role is Role.INPUT
    }


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize(
    "case",
    [
        Case(64, 32, 48, "fp32", "rrr"),
        Case(64, 32, 48, "fp16", "ccr"),
        Case(64, 32, 48, "bf16", batch=3),
        Case(64, 32, 48, "int8"),
        Case(64, 32, 48, "bf16", bias="yes"),
        Case(64, 32, 48, groups="5+0+64"),
    ],
    ids=lambda case: case.label,
)
def test_the_peer_computes_what_we_do(case: Case) -> None:
    import torch

    inputs = inputs_of(case)
    timing, note = peer.time_peer("torch", DEVICE, case, inputs, QUICK, 2)
    assert note == ""
    assert timing is not None
    assert timing.median_ns > 0
    out = GEMM.peer_call(torch, case, {name: peer._tensor(torch, array, "cpu") for name, array in inputs.items()})()
    if case.groups:
        for place, product in zip((0, 2), out, strict=True):
            assert np.allclose(product.numpy(), inputs[f"a[{place}]"] @ inputs[f"b[{place}]"], atol=1e-4)
        return
    want = np.matmul(inputs["a"].astype(np.float64), inputs["b"].astype(np.float64))
    want = want + inputs["bias"].astype(np.float64) if "bias" in inputs else want
    assert np.linalg.norm(out.double().numpy() - want) <= 1e-2 * np.linalg.norm(want)


def test_a_peer_that_is_not_there_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(8, 8, 8)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert peer.time_peer("torch", DEVICE, case, inputs_of(case), QUICK, 1) == (None, "torch is not installed")
    with pytest.raises(UnsupportedError, match="no such peer"):
        peer.time_peer("another", DEVICE, case, {}, QUICK, 1)


@pytest.mark.parametrize(("made_for", "other"), [("cuda", "hip"), ("hip", "cuda")])
def test_torch_is_asked_on_the_gpus_that_it_was_made_for(made_for: str, other: str) -> None:
    there = SimpleNamespace(is_available=lambda: True)
    torch = SimpleNamespace(cuda=there, version=SimpleNamespace(**{made_for: "1.0", other: None}))
    assert peer._is_for(torch, made_for)
    assert not peer._is_for(torch, other)
    torch.cuda = SimpleNamespace(is_available=lambda: False)
    assert not peer._is_for(torch, made_for)

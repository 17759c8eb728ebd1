"""Repeated calls on tensors of a GPU: recognised by all that a launch depends on, launched by what was settled. The
launch itself is recorded here; ``tests/gpu`` has real ones.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from producers import torch_like

from tilewright.dispatch.operands.slots import Slot
from tilewright.dispatch.plans import repeated_calls
from tilewright.tensor.interop import recognise
from tilewright.transport.rpc import MISSED
from tilewright.types.report import Report
from tilewright.types.spec import Spec

LABELS = ("a", "b")
STREAM = 7


class Device:
    """A client's core, and a plan for a product that records its launches."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, ...], int]] = []
        self.status = 0
        self.core: Any = SimpleNamespace(direct={}, closed=False, mapped={}, maps=True, report=None)
        plan = SimpleNamespace(on_cpu=False, flops=128)
        slots = [Slot(name, Spec((4, 4), np.dtype(np.float32)), (16, 4)) for name in ("a", "b", "out")]
        here = SimpleNamespace(plan=plan, inputs=slots[:2], run_again=self.run)
        self.state: Any = SimpleNamespace(
            core=self.core, here=here, closed=False, is_due=False, renew_at=math.inf, report=Report(),
            inputs=slots[:2], outputs=slots[2:],
        )  # fmt: skip

    def run(self, gpu: Any, ordinal: int, places: tuple[int, ...], stream: int) -> int:
        self.launched.append((places, stream))
        return self.status

    def settle(self, a: Any, b: Any, out: Any, given: bool = True) -> None:
        operands = [recognise(value, "operand") for value in (a, b)]
        words = {"out": out} if given else {}
        results = [repeated_calls.Result("out", given, False)]
        repeated_calls.settle("gemm", self.core, LABELS, (a, b), words, self.state, [*operands, out], results, False)

    def call(self, *args: Any, **words: Any) -> Any:
        return repeated_calls.attempt("gemm", self.core, args, words)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = torch_like(STREAM)
    module.empty_strided = lambda shape, steps, dtype, device: module.Tensor(4096, shape, dtype, steps)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def device(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Device:
    gpu = SimpleNamespace(handle=lambda stream: stream)
    monkeypatch.setattr("tilewright.tensor.interop.driver_of", lambda kind: gpu)
    found = Device()
    found.settle(*(torch.Tensor(address, (4, 4)) for address in (64, 128, 192)))
    return found


def test_a_call_alike_is_launched_on_its_own_arrays_and_the_current_stream(torch: Any, device: Device) -> None:
    a, b, out = (torch.Tensor(address, (4, 4)) for address in (1024, 2048, 3072))
    assert device.call(a, b, out=out) is out
    torch.current = 9
    assert device.call(a, a, out=out) is out
    assert device.launched == [((1024, 2048, 3072), STREAM), ((1024, 1024, 3072), 9)]
    assert device.core.report().placement == "caller"


def test_a_result_is_made_by_the_library(torch: Any, device: Device) -> None:
    a, b, out = (torch.Tensor(address, (4, 4)) for address in (64, 128, 192))
    assert device.call(a, b) is MISSED
    device.settle(a, b, out, given=False)
    assert device.call(a, b).address == 4096
    assert device.launched == [((64, 128, 4096), STREAM)]


OTHERS: dict[str, dict[str, Any]] = {
    "a shape": {"shape": (2, 8)},
    "a transposed one": {"strides": (1, 4)},
    "an element type": {"dtype": "float16"},
    "another GPU": {"index": 1},
    "the host": {"device": "cpu"},
    "an odd address": {"address": 1028},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_differs_takes_the_long_way(torch: Any, device: Device, name: str) -> None:
    b, out = torch.Tensor(2048, (4, 4)), torch.Tensor(3072, (4, 4))
    other = torch.Tensor(**{"address": 1024, "shape": (4, 4), **OTHERS[name]})
    assert device.call(other, b, out=out) is MISSED
    assert device.launched == []


def test_gradients_are_refused_by_the_long_way_and_only_where_they_are_recorded(torch: Any, device: Device) -> None:
    weight = torch.Tensor(1024, (4, 4), requires_grad=True)
    b, out = torch.Tensor(2048, (4, 4)), torch.Tensor(3072, (4, 4))
    torch.grad = True
    assert device.call(weight, b, out=out) is MISSED
    torch.grad = False
    assert device.call(weight, b, out=out) is out


def test_what_cannot_be_launched_takes_the_long_way(torch: Any, device: Device) -> None:
    given = [torch.Tensor(address, (4, 4)) for address in (1024, 2048, 3072)]
    for name, value in (("closed", True), ("mapped", {1: 2})):
        before = getattr(device.core, name)
        setattr(device.core, name, value)
        assert device.call(*given[:2], out=given[2]) is MISSED
        setattr(device.core, name, before)
    assert device.launched == []
    device.status = 13
    assert device.call(*given[:2], out=given[2]) is MISSED


def test_copies_and_arrays_of_several_libraries_are_not_settled(torch: Any, device: Device) -> None:
    device.core.direct.clear()
    a, b, out = (torch.Tensor(address, (4, 4)) for address in (64, 128, 192))
    copied = torch.Tensor(256, (4, 4))
    results = [repeated_calls.Result("out", True, False)]
    operands = [recognise(copied, "a"), recognise(b, "b"), out]
    repeated_calls.settle("gemm", device.core, LABELS, (a, b), {"out": out}, device.state, operands, results, False)
    host = np.zeros((4, 4), np.float32)
    operands = [recognise(a, "a"), host, out]
    repeated_calls.settle("gemm", device.core, LABELS, (a, host), {"out": out}, device.state, operands, results, False)
    assert not device.core.direct

"""Wrong results are found, in small problems and in large ones, and right ones pass whatever was rounded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilewright_arch
from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import Role
from tilewright_kit.numerics.compare import poison
from tilewright_kit.numerics.contents import contents, view
from tilewright_tools.tuning.measure import check
from tilewright_tools.tuning.measure.check import Truth

DEVICE = device_of(tilewright_arch.load("x86-64-v3"))
OPERATION = GemmOperation()
CASES = [
    Case(70, 90, 110, "fp32"),
    Case(70, 90, 110, "fp16", "rrr"),
    Case(70, 90, 110, "bf16", "crr", batch=3),
    Case(70, 90, 110, "int8", "ccr"),
    Case(70, 90, 110, "int8", batch=2),
    Case(70, 90, 110, "mixed", out_dtype="bf16"),
    Case(70, 90, 110, "bf16", "ccr", bias="yes", activation="Gelu", d=1, scale_a="row", scale_b="column"),
]


class Judged:
    """A problem, its truth and a right output; ``large`` has it judged as large problems are."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch, *, large: bool, init: Any = "normal") -> None:
        monkeypatch.setattr(check, "WHOLE", 0 if large else 1 << 40)
        self.problem = OPERATION.parse(case.request())
        rng = np.random.default_rng(7)
        inputs = {
            item.name: view(contents(item.desc, init, rng), item.desc)
            for item in self.problem.operands
            if item.role is Role.INPUT
        }
        self.truth = Truth(OPERATION, self.problem, case, inputs, DEVICE, rng)
        assert self.truth.is_whole is not large
        desc = next(item.desc for item in self.problem.operands if item.role is Role.OUTPUT)
        exact = OPERATION.reference(self.problem, inputs)["out"]
        self.right = np.array(exact.astype(desc.dtype.numpy))
        self.poison = poison(desc.dtype, desc.shape)

    def reason(self, out: np.ndarray[Any, Any]) -> str:
        return self.truth.check({"out": out}, {"out": self.poison}).reason

    def spoiled(self, place: tuple[Any, ...], value: Any) -> str:
        out = self.right.copy()
        out[place] = value
        return self.reason(out)


@pytest.mark.parametrize("large", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_right_result_passes_and_an_unwritten_one_does_not(
    case: Case, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Judged(case, monkeypatch, large=large)
    assert judged.reason(judged.right) == ""
    assert judged.reason(judged.poison)
    assert judged.reason(np.zeros_like(judged.right))
    assert judged.reason(judged.right * judged.right.dtype.type(2))


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2], CASES[3]], ids=lambda case: case.label)
def test_one_wrong_element_anywhere_in_a_large_product_is_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged(case, monkeypatch, large=True)
    size = np.abs(judged.right.astype(np.float64)).max()
    rng = np.random.default_rng(1)
    for _ in range(20):
        place = tuple(int(rng.integers(extent)) for extent in judged.right.shape)
        right = float(judged.right[place])
        assert judged.spoiled(place, -right - math.copysign(size / 2, right)), place


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("large", [False, True], ids=["whole", "parts"])
def test_one_element_that_is_no_number_is_found(large: bool, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged(CASES[1], monkeypatch, large=large)
    assert judged.spoiled((41, 37), value)


def test_a_tile_that_was_not_written_is_found_behind_any_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged(CASES[-1], monkeypatch, large=True)
    assert "not written" in judged.spoiled((slice(33, 35), slice(40, 42)), np.nan) or judged.spoiled((33, 40), np.nan)


def test_small_whole_numbers_are_exact_in_every_type(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Judged(replace(CASES[1], k=30), monkeypatch, large=False, init="trunc-int")
    verdict = judged.truth.check({"out": judged.right}, {"out": judged.poison})
    assert (verdict.error, verdict.reason) == (0.0, "")


def test_operands_that_are_laid_out_by_strides_hold_what_their_memory_holds() -> None:
    request = Case(5, 7, 3, "fp32", "ccr", batch=2).request()
    desc = request.inputs["a"]
    memory = contents(desc, "normal", np.random.default_rng(0))
    array = view(memory, desc)
    assert array.shape == (2, 5, 3)
    assert array[1, 4, 2] == memory[15 + 4 + 2 * 5]

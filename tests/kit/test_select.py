"""Strategies are deterministic, and an explanation leaves no kernel of a set unmentioned."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import toy

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Prediction
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.selection.candidates import shortlist
from tilewright_kit.selection.explain import explain
from tilewright_kit.selection.strategies import Explicit, FirstFit, Heuristic, Ranked, Selector, Strategy
from tilewright_kit.types.errors import ConfigInvalidError, NotFoundError, UnsupportedError
from tilewright_kit.types.tensor import TensorDesc

ToyConfig = toy.ToyConfig
OPERATION = toy.ToyOperation()


def problem_of(n: int = 1000, stride: int = 1) -> toy.ToyProblem:
    x = TensorDesc.of("fp32", (n,), (stride,))
    return OPERATION.parse(OperationRequest("toy", {"x": x, "y": x}))


def operation(**members: Any) -> Any:
    return type("Changed", (toy.ToyOperation,), members)()


def test_first_fit_keeps_the_order_of_the_operation(device: DeviceInfo) -> None:
    candidates = OPERATION.candidates(problem_of(), device)
    assert [item.config for item in FirstFit().rank(OPERATION, problem_of(), candidates, device)] == list(candidates)


def test_heuristic_ranks_by_predicted_time_and_then_by_name(device: DeviceInfo) -> None:
    candidates = OPERATION.candidates(problem_of(), device)
    ranked = Heuristic().rank(OPERATION, problem_of(), candidates, device)
    order = [(item.prediction.seconds, item.config.name) for item in ranked if item.prediction]
    assert order == sorted(order)
    assert len(order) == len(candidates)
    backwards = Heuristic().rank(OPERATION, problem_of(), candidates[::-1], device)
    assert [item.config for item in backwards] == [item.config for item in ranked]


def test_a_kernel_that_was_predicted_to_be_proposed_is_not_predicted_again(device: DeviceInfo) -> None:
    predicted: list[str] = []

    def predict(self: Any, problem: Any, config: toy.ToyConfig, device: DeviceInfo) -> Prediction:
        predicted.append(config.name)
        return toy.ToyOperation.predict(self, problem, config, device)

    def candidates(self: Any, problem: Any, device: DeviceInfo) -> Any:
        found = toy.ToyOperation.candidates(self, problem, device)
        return shortlist(found, 5, lambda config: self.predict(problem, config, device))

    counting = operation(predict=predict, candidates=candidates)
    ranked = Selector(Heuristic()).rank(counting, problem_of(), device)
    assert len(ranked) == 5
    assert len(predicted) == len(set(predicted)) > 5
    plain = Heuristic().rank(OPERATION, problem_of(), [item.config for item in ranked], device)
    assert list(ranked) == list(plain), "the same order and predictions as without"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_prediction_that_is_no_time_never_wins(device: DeviceInfo, bad: float) -> None:
    broken = operation(
        predict=lambda self, problem, config, device: Prediction(bad if config.vector == 8 else float(config.vector))
    )
    ranked = Selector(Heuristic()).rank(broken, problem_of(), device)
    vectors = [item.config.vector for item in ranked if isinstance(item.config, ToyConfig)]
    assert vectors[0] == 1
    assert vectors[-1] == 8


def test_an_explicit_kernel_is_found_by_name_key_text_and_config(device: DeviceInfo) -> None:
    config = OPERATION.candidates(problem_of(), device)[3]
    key = config.key(device.arch.id)
    for kernel in (config, config.name, key, str(key)):
        [ranked] = Selector(Explicit(kernel)).rank(OPERATION, problem_of(), device)
        assert ranked.config == config


def test_an_explicit_kernel_that_nobody_has_is_not_found(device: DeviceInfo) -> None:
    for kernel in ("toy_nothing", ToyConfig().key("gfx942")):
        with pytest.raises(NotFoundError):
            Selector(Explicit(kernel)).select(OPERATION, problem_of(), device)


def test_an_explicit_kernel_that_rules_refuse_is_invalid_with_reasons(device: DeviceInfo) -> None:
    declared = next(config for config, _ in toy.DEFAULT.rejected(device.arch, toy.RULES))
    for kernel in (ToyConfig(vector=7), declared.name):
        with pytest.raises(ConfigInvalidError) as caught:
            Selector(Explicit(kernel)).select(OPERATION, problem_of(), device)
        assert caught.value.violations


def test_an_explicit_kernel_that_cannot_compute_this_is_unsupported_with_reasons(device: DeviceInfo) -> None:
    name = ToyConfig(vector=8).name
    with pytest.raises(UnsupportedError, match="strided vectors") as caught:
        Selector(Explicit(name)).select(OPERATION, problem_of(stride=2), device)
    assert [violation.rule for violation in caught.value.violations] == ["contiguous"]


def test_no_candidate_is_unsupported_with_the_most_frequent_reasons(device: DeviceInfo) -> None:
    def mismatches(self: Any, problem: Any, config: Any, device: Any) -> Any:
        return [
            *toy.ToyOperation.mismatches(self, problem, config, device),
            toy.Violation("moon", "n", 1, "wrong moon"),
        ]

    with pytest.raises(UnsupportedError, match="wrong moon") as caught:
        Selector().select(operation(mismatches=mismatches), problem_of(), device)
    assert caught.value.violations[0].rule == "moon"


@pytest.mark.parametrize("strategy", [FirstFit(), Heuristic(), Explicit(ToyConfig(vector=1, tile=(1, 1, 1)))])
def test_an_explanation_names_every_kernel_once(device: DeviceInfo, strategy: Strategy) -> None:
    explanation = explain(OPERATION, problem_of(stride=2), device, strategy)
    expanded = toy.DEFAULT.expand(device.arch, toy.RULES)
    rejected = toy.DEFAULT.rejected(device.arch, toy.RULES)
    told = [item.config for item in (*explanation.candidates, *explanation.refused)]
    assert len(told) == len(set(told))
    assert set(told) == {*expanded, *(config for config, _ in rejected)}
    assert all(item.violations for item in explanation.refused)
    assert {item.by for item in explanation.refused} == {"rules", "problem"}
    assert explanation.chosen == explanation.candidates[0].key
    assert all(item.prediction.seconds > 0 for item in explanation.candidates)
    assert strategy.name in explanation.decided
    json.dumps(explanation.to_dict(), allow_nan=False)


def test_an_explanation_tells_a_kernel_that_was_merely_not_proposed(device: DeviceInfo) -> None:
    lazy = operation(candidates=lambda self, problem, device: OPERATION.candidates(problem, device)[:1])
    explanation = explain(lazy, problem_of(), device, FirstFit())
    assert any(item.violations[0].rule == "not_proposed" for item in explanation.refused)


class PredictsAndTellsNot(Heuristic):
    """Ranks half of the candidates by predicted time, and hands back no prediction."""

    def rank(self, operation: Any, problem: Any, candidates: Any, device: DeviceInfo) -> Sequence[Ranked]:
        ranked = super().rank(operation, problem, candidates, device)
        return [Ranked(item.config, "first half") for item in ranked[: len(ranked) // 2]]


@pytest.mark.parametrize("with_predictions", [True, False], ids=["predicted", "bare"])
@pytest.mark.parametrize(
    "strategy",
    [FirstFit(), Heuristic(), PredictsAndTellsNot(), Explicit(ToyConfig(vector=1, tile=(1, 1, 1)))],
    ids=["first_fit", "heuristic", "tells_not", "explicit"],
)
def test_an_explanation_predicts_no_kernel_twice(
    device: DeviceInfo, strategy: Strategy, with_predictions: bool
) -> None:
    predicted: list[str] = []

    def predict(self: Any, problem: Any, config: toy.ToyConfig, device: DeviceInfo) -> Prediction:
        predicted.append(config.name)
        return toy.ToyOperation.predict(self, problem, config, device)

    def candidates(self: Any, problem: Any, device: DeviceInfo) -> Any:
        found = toy.ToyOperation.candidates(self, problem, device)
        if not with_predictions:
            return found
        return Candidates(found, (self.predict(problem, config, device) for config in found))

    told = explain(operation(predict=predict, candidates=candidates), problem_of(), device, strategy).candidates
    assert told and sorted(predicted) == sorted(item.config.name for item in told)


def test_an_explanation_tells_what_the_strategy_refused(device: DeviceInfo) -> None:
    explanation = explain(OPERATION, problem_of(), device, Explicit("toy_nothing"), limit=2)
    assert explanation.chosen is None
    assert "no kernel of that name" in explanation.decided
    assert all(candidate.place == 0 for candidate in explanation.candidates)
    assert len(explanation.refused) == 2 < explanation.refused_total


def test_an_explanation_of_kernels_that_no_model_can_time_is_still_json(device: DeviceInfo) -> None:
    broken = operation(predict=lambda self, problem, config, device: Prediction(math.nan, {"memory": math.inf}))
    record = json.loads(json.dumps(explain(broken, problem_of(), device, Heuristic()).to_dict(), allow_nan=False))
    assert record["candidates"][0]["predicted_seconds"] is None

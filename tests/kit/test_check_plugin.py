"""``check_plugin`` passes an honest operation and names each planted fault."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import toy

import tilewright_arch
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import part, suffix
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.conformance.check_plugin import CheckFailed, Status, check_plugin
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.contract.plan import WORKSPACE, Pointer, Stage, Struct
from tilewright_kit.kernel_sets.declare import KernelSet, declare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import UnsupportedError

ARCHS = [tilewright_arch.load(name) for name in ("x86-64-v3", "gfx942")]


def compute(operation: Any, request: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    problem = operation.parse(request)
    return {"out": operation.reference(problem, inputs)["out"].astype(problem.out.dtype.numpy)}


def test_an_honest_operation_passes_every_check_on_every_arch() -> None:
    built: list[str] = []
    report = check_plugin(toy.ToyOperation(), build=lambda unit, arch: built.append(unit.name), run=compute)
    report.raise_if_failed()
    assert [check.name for check in report.with_status(Status.SKIPPED)] == []
    assert built and report["run"].status is Status.PASSED


def test_a_report_is_readable_and_names_what_was_not_done() -> None:
    report = check_plugin(toy.ToyOperation(), archs=ARCHS)
    assert report.passed
    assert "skipped run: no run callback was given" in str(report)


def test_an_operation_may_say_why_nothing_computes_a_problem() -> None:
    def candidates(self: Any, problem: toy.ToyProblem, device: Any) -> Any:
        if problem.x.dtype is DType.FP16:
            raise UnsupportedError("there are no such kernels", field="x", value="fp16", rule="dtype", fix="use fp32")
        return toy.ToyOperation.candidates(self, problem, device)

    report = check_plugin(with_(candidates=candidates), archs=ARCHS, run=compute)
    report.raise_if_failed()


# ---- planted faults: an operation, and the check that must name it ----


def with_config(config_type: type[KernelConfig], **methods: Any) -> Any:
    kernels = KernelSet("default", "", (declare(config_type),), toy.choices)
    return with_(config_type=config_type, kernel_sets={"default": kernels}, **methods)


def with_(**members: Any) -> Any:
    return type("Planted", (toy.ToyOperation,), members)()


def with_rules(*rules: Callable[..., Any]) -> Any:
    return with_(rules=RuleBook([*toy.RULES.rules, *rules]))


@dataclass(frozen=True)
class LossyName(KernelConfig):
    operation: ClassVar[str] = "toy"
    dtype: DType = part(DType.FP32)  # noqa: RUF009
    pipeline: str = part("mem", text=lambda value: value[:1])
    tile: tuple[int, int, int] = part((1024, 1, 1))
    vector: int = part(4)
    streaming: bool = suffix("nt", False)


@dataclass(frozen=True)
class IgnoredInKey(toy.ToyConfig):
    operation: ClassVar[str] = "toy"

    def to_dict(self) -> dict[str, Any]:
        record = super().to_dict()
        del record["streaming"]
        return record


def unused_field() -> Any:
    def generate(self: Any, config: Any, arch: Any) -> Any:
        unit = toy.generate(config.replace(streaming=False), arch, self.version)
        symbol = "tw_" + config.name
        text = unit.text.replace(unit.entries["main"], symbol)
        return dataclasses.replace(unit, name=config.name, text=text, entries={"main": symbol})

    return with_(generate=generate)


def restless_candidates() -> Any:
    turns = itertools.count()

    def candidates(self: Any, problem: Any, device: Any) -> Any:
        found = list(toy.ToyOperation.candidates(self, problem, device))
        return found[::-1] if next(turns) % 2 else found

    return with_(candidates=candidates)


def foreign_candidates() -> Any:
    return with_(candidates=lambda self, problem, device: [toy.ToyConfig(vector=3, tile=(1000, 1, 1))])


def fix_that_does_not_fix(config: Any, arch: Any) -> Any:
    if config.streaming and config.vector == 1:
        yield Violation("stubborn", "vector", 1, "streaming stores are wide", {"tile": (2048, 1, 1)})


def fix_of_no_field(config: Any, arch: Any) -> Any:
    if config.vector == 1:
        yield Violation("confused", "vector", 1, "too small", {"vectors": 2})


def endless_fixes(config: Any, arch: Any) -> Any:
    if config.streaming and config.vector == 1:
        size = config.tile[0] + 1
        yield Violation("greedy", f"tile{size}", config.tile, "always one more", {"tile": (size, 1, 1)})


def rule_that_raises(config: Any, arch: Any) -> Any:
    if config.tile[0] // config.vector == 0:
        yield Violation("division", "tile", config.tile, "smaller than a vector")


def replan(change: Callable[[Any], Any]) -> Any:
    def plan(self: Any, problem: Any, config: Any, device: Any) -> Any:
        made = toy.ToyOperation.plan(self, problem, config, device)
        return dataclasses.replace(made, **change(made)) if made.stages else made

    return with_(plan=plan)


def pointing(name: str, offset: int = 0) -> Callable[[Any], Any]:
    def change(plan: Any) -> Any:
        stage: Stage = plan.stages[0]
        args = Struct((*stage.args.fields, Pointer(name, offset)))
        return {"stages": (dataclasses.replace(stage, args=args),)}

    return change


def predictor(*seconds: float) -> Any:
    turns = itertools.cycle(seconds)
    return with_(predict=lambda self, problem, config, device: Prediction(next(turns)))


def careless_parse() -> Any:
    def parse(self: Any, request: Any) -> Any:
        return toy.ToyProblem(request.inputs["x"], request.inputs["y"], request.inputs["x"])

    return with_(parse=parse)


def declared(
    attribute: Any = None, operands: Any = lambda items: items, examples: Any = toy.DECLARATION.examples
) -> Any:
    """An operation whose declaration is not what it does."""
    attributes = () if attribute is None else (dataclasses.replace(toy.SCALE, **attribute),)
    changed = dataclasses.replace(
        toy.DECLARATION, attributes=attributes, operands=operands(toy.DECLARATION.operands), examples=examples
    )
    return with_(declaration=changed)


FAULTS: list[tuple[str, Callable[[], Any], str]] = [
    ("a name that ignores part of a field", lambda: with_config(LossyName), "naming.pipeline"),
    ("a key that ignores a field", lambda: with_config(IgnoredInKey), "naming.streaming"),
    ("a dict that loses a field", lambda: with_(config_type=IgnoredInKey, kernel_sets={
        "default": KernelSet("default", "", (declare(IgnoredInKey, streaming=True),))}), "naming.round_trip"),
    ("a source that ignores a field", unused_field, "source.streaming"),
    ("candidates in changing order", restless_candidates, "candidates.deterministic@x86-64-v3"),
    ("a candidate that rules refuse", foreign_candidates, "candidates.valid@x86-64-v3"),
    ("a fix that does not fix", lambda: with_rules(fix_that_does_not_fix), "rules.fixes"),
    ("a fix of a field that does not exist", lambda: with_rules(fix_of_no_field), "rules.reasons"),
    ("fixes without end", lambda: with_rules(endless_fixes), "rules.correct"),
    ("a rule that raises", lambda: with_rules(rule_that_raises), "rules.reasons"),
    ("a plan that names no operand", lambda: replan(pointing("z")), "plan@x86-64-v3"),
    ("a plan that points past an operand", lambda: replan(pointing("x", 10**9)), "plan@x86-64-v3"),
    ("a plan that forgets its workspace", lambda: replan(pointing(WORKSPACE)), "plan@x86-64-v3"),
    ("a plan without stages", lambda: replan(lambda plan: {"stages": ()}), "plan@x86-64-v3"),
    ("a plan for another arch", lambda: replan(lambda plan: {"arch": "abacus"}), "plan@x86-64-v3"),
    ("a plan that no JSON holds", lambda: replan(lambda plan: {"details": {"x": object()}}), "plan@x86-64-v3"),
    ("a stage that calls no entry", lambda: replan(
        lambda plan: {"stages": (dataclasses.replace(plan.stages[0], role="side"),)}), "plan@x86-64-v3"),
    ("a prediction of no time", lambda: predictor(0.0), "predict@x86-64-v3"),
    ("a prediction of NaN", lambda: predictor(float("nan")), "predict@x86-64-v3"),
    ("predictions that change", lambda: predictor(1.0, 2.0), "predict@x86-64-v3"),
    ("a parser that trusts its caller", careless_parse, "parse.garbage"),
    ("a prefilter that drops valid kernels", lambda: with_(kernel_sets={"default": dataclasses.replace(
        toy.DEFAULT, prefilter=lambda known, arch: not known.get("streaming", False))}), "sets.prefilter"),
    ("a reference that writes its inputs", lambda: with_(
        reference=lambda self, problem, inputs: {"out": np.add(inputs["x"], 1, out=inputs["x"])}), "reference"),
    ("an attribute that is not declared", declared, "declaration.samples"),
    ("an operand that is not declared", lambda: declared({}, lambda items: items[1:]), "declaration.samples"),
    ("a default that is another", lambda: declared({"default": 2.0}), "declaration.attributes"),
    ("no word of what leaving out means", lambda: declared({"default": None}), "declaration.attributes"),
    ("a bound that nothing checks", lambda: declared({"highest": 5.0}), "declaration.attributes"),
    ("choices that nothing checks", lambda: declared({"choices": ("large",)}), "declaration.attributes"),
    ("an element type that is not declared", lambda: declared({}, lambda items: (
        dataclasses.replace(items[0], dtypes=items[0].dtypes[:1]), *items[1:])), "declaration.operands"),
    ("no example", lambda: declared({}, examples=()), "declaration.examples"),
    ("no default set", lambda: with_(kernel_sets={}), "contract"),
    ("a missing method", lambda: with_(mismatches=None), "contract"),
    ("choices that raise", lambda: with_(kernel_sets={"default": dataclasses.replace(
        toy.DEFAULT, choices=lambda *_: 1 / 0)}), "contract"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "named"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_planted_fault_is_named(plant: Callable[[], Any], named: str) -> None:
    report = check_plugin(plant(), archs=ARCHS[:1], per_arch=16)
    assert report[named].status is Status.FAILED, str(report)
    with pytest.raises(CheckFailed, match=named):
        report.raise_if_failed()


def test_wrong_results_are_found_in_the_sample_run() -> None:
    def wrong(operation: Any, request: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: array * 1.01 for name, array in compute(operation, request, inputs).items()}

    report = check_plugin(toy.ToyOperation(), archs=ARCHS[:1], run=wrong)
    assert [check.name for check in report.failed] == ["run"]


def test_a_kernel_that_does_not_build_is_named() -> None:
    def build(unit: Any, arch: Any) -> None:
        raise RuntimeError("no such header")

    report = check_plugin(toy.ToyOperation(), archs=ARCHS[:1], build=build)
    assert "no such header" in report["build"].detail


def test_a_field_that_only_the_planner_reads_need_not_show_in_the_source() -> None:
    @dataclass(frozen=True)
    class Planned(toy.ToyConfig):
        operation: ClassVar[str] = "toy"
        plan_fields: ClassVar[tuple[str, ...]] = ("slices",)
        slices: int = suffix("slices", 1)

    report = check_plugin(with_config(Planned), archs=ARCHS[:1])
    assert report["source.slices"].status is Status.SKIPPED
    report.raise_if_failed()

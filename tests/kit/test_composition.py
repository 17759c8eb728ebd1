"""Plans made of plans: operands find their places, scratch is shared, counters are not."""

from __future__ import annotations

import pytest
import toy

import tilewright_arch
from tilewright_kit.contract.arguments import COUNTERS, I64, WORKSPACE, Pointer, Struct, Table, TensorMap
from tilewright_kit.contract.composition import Composition
from tilewright_kit.contract.plan import ExecutionPlan, Stage
from tilewright_kit.contract.problem import Operand, Role
from tilewright_kit.types.tensor import TensorDesc

ARCH = tilewright_arch.load("sm_90a")
DESC = TensorDesc.of("fp32", (10, 10))


def part(workspace: int, counters: int = 0, **alignment: int) -> ExecutionPlan:
    """A plan that reads ``a``, writes ``out`` and uses everything a plan may use."""

    table = Table((Struct((Pointer("a", 8), I64(3))),))
    described = TensorMap("out", 16, "fp32", (10, 10), (40,), (10, 10))
    args = Struct((table, Pointer(), Pointer(WORKSPACE, 32), Pointer(COUNTERS, 4), described))
    return ExecutionPlan(
        "toy",
        ARCH.id,
        (Operand("a", DESC, Role.INPUT), Operand("out", DESC, Role.OUTPUT)),
        (Stage("main", toy.ToyConfig(), "main", args),),
        workspace_bytes=workspace,
        counter_bytes=counters,
        notes=("a note",),
        details={"alignment": alignment},
    )


def test_operands_scratch_and_counters_find_their_places() -> None:
    whole = Composition()
    between = whole.intermediate(DESC)
    whole.add("first", part(100, 4, a=16, out=32), {"a": "x", "out": between})
    whole.add("second", part(300, 4, a=64, out=8), {"a": between, "out": "y"})
    operands = (Operand("x", DESC, Role.INPUT), Operand("y", DESC, Role.OUTPUT))
    plan = whole.plan("both", ARCH.id, operands, flops=7)
    first, second = (stage.args.fields for stage in plan.stages)
    assert [stage.name for stage in plan.stages] == ["first.main", "second.main"]
    assert first[0] == Table((Struct((Pointer("x", 8), I64(3))),)) and first[1] == Pointer()
    assert second[0] == Table((Struct((Pointer(WORKSPACE, 8), I64(3))),))
    # The tensor between them fills 400 bytes; scratch begins at the next multiple of 64, for both.
    assert first[2] == second[2] == Pointer(WORKSPACE, 448 + 32)
    assert plan.workspace_bytes == 448 + 300
    assert (first[3], second[3]) == (Pointer(COUNTERS, 4), Pointer(COUNTERS, 64 + 4)) and plan.counter_bytes == 68
    assert isinstance(first[4], TensorMap) and (first[4].operand, first[4].offset) == (WORKSPACE, 16)
    assert isinstance(second[4], TensorMap) and (second[4].operand, second[4].offset) == ("y", 16)
    assert plan.details == {"alignment": {"x": 16, "y": 8}} and plan.flops == 7
    assert plan.notes == ("first: a note", "second: a note")
    types = {stage.config.operation: type(stage.config) for stage in plan.stages}
    assert ExecutionPlan.from_dict(plan.to_dict(), types) == plan


def test_an_operand_without_a_place_is_named() -> None:
    whole = Composition()
    whole.add("only", part(0), {"a": "x"})
    with pytest.raises(KeyError, match="out"):
        whole.plan("one", ARCH.id, ())

"""Requests of ``moe_gemm``: what is wrong with one is said by field and rule, and wrong counts before a launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from moe_runner import SQUARES

import tilewright_arch
from tilewright_kit.conformance.check_plugin import check_plugin, device_of, plan_findings
from tilewright_kit.contract.arguments import Struct, TensorMap
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import ExecutionPlan, pack
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.tiles.footprint.workgroup import shared_bytes
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_moe.config import MoeConfig
from tilewright_moe.counts import check_values
from tilewright_moe.plan import plan_moe
from tilewright_moe.plugin import MoeGemm
from tilewright_moe.problem import MoeProblem

MOE = MoeGemm()
of = TensorDesc.of


def request(
    more: dict[str, Any] | None = None, outputs: dict[str, Any] | None = None, **words: Any
) -> OperationRequest:
    given = {"x": of("bf16", (20, 64)), "w": of("bf16", (4, 48, 64)), "counts": of("int32", (4,))}
    return OperationRequest("moe_gemm", {**given, **(more or {})}, outputs or {}, words)


def test_what_is_left_out_is_inferred() -> None:
    problem = MOE.parse(request())
    assert (problem.layout, problem.masked, problem.experts, problem.rows, problem.n, problem.k) == (
        "rcr", False, 4, 20, 48, 64,
    )  # fmt: skip
    assert problem.desc("out") == of("bf16", (20, 48)) and problem.typical_rows == 5
    room = MOE.parse(request({"x": of("bf16", (4, 20, 64))}, expected_rows=3, return_status=True))
    assert room.masked and room.typical_rows == 3 and room.desc("status") == of("int32", (4,))
    assert MOE.parse(request({"w": of("bf16", (4, 48, 64), (64 * 48, 1, 48))})).layout == "rrr"


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"x": of("bf16", (20, 63))}, "x.shape", "k_mismatch"),
        ({"x": of("bf16", (20,))}, "x.shape", "rank"),
        ({"x": of("bf16", (3, 20, 64))}, "x.shape", "expert_count"),
        ({"x": of("bf16", (20, 64), (1, 20))}, "x.strides", "row_layout"),
        ({"x": of("int8", (20, 64))}, "x.dtype", "operand_dtype"),
        ({"w": of("fp16", (4, 48, 64))}, "w.dtype", "dtype_pair"),
        ({"w": of("bf16", (48, 64))}, "w.shape", "rank"),
        ({"w": of("bf16", (0, 48, 64)), "counts": of("int32", (0,))}, "w.shape", "expert_count"),
        ({"w": of("bf16", (4, 48, 64), (48 * 128, 128, 2))}, "w.strides", "weight_layout"),
        ({"counts": of("int32", (5,))}, "counts.shape", "counts_shape"),
        ({"counts": of("int32", (4,), (2,))}, "counts.strides", "counts_layout"),
        ({"counts": of("fp32", (4,))}, "counts.dtype", "operand_dtype"),
        ({"scale_w": of("fp32", (3,))}, "scale_w.shape", "scale_shape"),
        ({"scale_x": of("fp32", (4,))}, "scale_x.shape", "scale_shape"),
        ({"scale_x": of("bf16", ())}, "scale_x.dtype", "operand_dtype"),
        ({"bias": of("bf16", (48,))}, "bias", "operand_known"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_rejected_by_name(change: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        MOE.parse(request(change))
    assert (caught.value.field, caught.value.rule) == (field, rule) and caught.value.fix


@pytest.mark.parametrize(
    ("change", "field", "rule"),
    [
        ({"scale_x": of("fp32", (20, 3))}, "scale_x.shape", "block_scale_shape"),
        ({"scale_x": of("fp32", (4, 20, 2))}, "scale_x.shape", "block_scale_shape"),
        ({"scale_x": of("bf16", (20, 2))}, "scale_x.dtype", "block_scale_dtype"),
        ({"scale_w": of("fp32", (4, 2, 2))}, "scale_w.shape", "block_scale_shape"),
        ({"scale_w": of("fp32", (3, 1, 2))}, "scale_w.shape", "block_scale_shape"),
        ({"scale_w": of("fp32", ())}, "scale_w.shape", "block_scale_shape"),
        ({"x": of("bf16", (20, 192)), "w": of("bf16", (4, 48, 192))}, "x.dtype", "block_scale_operands"),
        ({"scale_w": None}, "scale_w", "block_scale_operands"),
    ],
    ids=str,
)
def test_factors_that_do_not_fit_their_blocks_are_rejected(change: dict[str, Any], field: str, rule: str) -> None:
    given = {
        "x": of("fp8", (20, 192)), "w": of("fp8", (4, 48, 192)), "scale_x": of("fp32", (20, 2)),
        "scale_w": of("fp32", (4, 1, 2)),
    }  # fmt: skip
    MOE.parse(request(given, scale_block=SQUARES))
    asked = request(given | change, scale_block=SQUARES)
    inputs = {name: item for name, item in asked.inputs.items() if item is not None}
    with pytest.raises(InvalidArgumentError) as caught:
        MOE.parse(replace(asked, inputs=inputs))
    assert (caught.value.field, caught.value.rule) == (field, rule) and caught.value.fix


def test_steps_that_do_not_fit_are_rejected() -> None:
    gate, eight = {"activation": "swiglu"}, {"out_scale_block": "1x128"}
    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
        ({"w": of("bf16", (4, 40, 64))}, {}, gate, "swiglu_columns"),
        ({}, {"out": of("bf16", (20, 48))}, gate, "output_shape"),
        ({}, {"out": of("bf16", (20, 48))}, eight, "output_dtype"),
        ({}, {"out_scale": of("fp32", (20, 2))}, eight, "output_shape"),
        ({}, {"out_scale": of("bf16", (20, 1))}, eight, "operand_dtype"),
        ({}, {"out_scale": of("fp32", (20, 1))}, {}, "out_scale_operand"),
        ({}, {}, {"activation": "gelu"}, "attribute_choice"),
    ]
    for change, outputs, words, rule in cases:
        with pytest.raises(InvalidArgumentError) as caught:
            MOE.parse(request(change, outputs, **words))
        assert caught.value.rule == rule and caught.value.fix, (change, outputs, words)
    problem = MOE.parse(request(**gate, **eight))
    assert problem.desc("out") == of("fp8", (20, 24)) and problem.desc("out_scale") == of("fp32", (20, 1))


@pytest.mark.parametrize("name", ["x86-64-v3", "sm_80", "sm_90a", "gfx942", "gfx1201"])
def test_every_device_has_kernels_for_steps_behind_the_sums(name: str) -> None:
    device = device_of(tilewright_arch.load(name))
    blocks = {"scale_x": of("fp32", (64, 4)), "scale_w": of("fp32", (4, 4, 4))}
    words: tuple[dict[str, str], ...] = (
        {"activation": "swiglu"}, {"out_scale_block": "1x128"}, {"activation": "swiglu", "out_scale_block": "1x128"},
    )  # fmt: skip
    for steps in words:
        for dtype in ("fp32", "bf16", *(("fp8",) if name != "sm_80" else ())):
            scaled = dtype == "fp8"
            given = {"x": of(dtype, (64, 512)), "w": of(dtype, (4, 512, 512)), **(blocks if scaled else {})}
            problem = MOE.parse(request(given, **steps, **({"scale_block": SQUARES} if scaled else {})))
            assert MOE.candidates(problem, device), (steps, dtype)


def test_outputs_that_do_not_fit_are_rejected() -> None:
    for out, rule in (
        (of("bf16", (20, 47)), "output_shape"),
        (of("fp8", (20, 48)), "output_dtype"),
        (of("bf16", (20, 48), (1, 20)), "row_layout"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            MOE.parse(request(outputs={"out": out}))
        assert caught.value.rule == rule and caught.value.fix


@pytest.mark.parametrize(
    ("room", "counts", "field", "rule"),
    [
        (False, [5, -1, 0, 0], "counts[1]", "count_range"),
        (False, [0, 0, 21, 0], "counts[2]", "count_range"),
        (False, [7, 7, 7, 0], "counts[2]", "count_sum"),
        (True, [20, 20, 20, 21], "counts[3]", "count_range"),
    ],
)
def test_wrong_counts_are_rejected_before_a_launch(room: bool, counts: list[int], field: str, rule: str) -> None:
    problem = MOE.parse(request({"x": of("bf16", (4, 20, 64))} if room else {}))
    with pytest.raises(InvalidArgumentError) as caught:
        check_values(problem, {"counts": np.array(counts, np.int32)})
    assert (caught.value.field, caught.value.rule) == (field, rule) and caught.value.fix


def test_counts_that_fit_are_taken() -> None:
    for counts in ([0, 0, 0, 0], [20, 0, 0, 0], [5, 5, 5, 5], [1, 2, 3, 4]):
        check_values(MOE.parse(request()), {"counts": np.array(counts, np.int32)})
    check_values(MOE.parse(request({"x": of("bf16", (4, 20, 64))})), {"counts": np.full(4, 20, np.int32)})
    check_values(MOE.parse(request()), {})


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["sm_90a", "x86-64-v3", "sm_80", "gfx942"])
def test_it_keeps_the_contract(name: str) -> None:
    check_plugin(MOE, archs=[tilewright_arch.load(name)], per_arch=6).raise_if_failed()


@pytest.mark.parametrize("name", ["x86-64-v3", "sm_80", "sm_90a", "gfx942", "gfx1201"])
def test_every_device_has_kernels_for_few_rows_and_for_many(name: str) -> None:
    device = device_of(tilewright_arch.load(name))
    for rows in (1, 40, 512, 8192):
        for dtype in ("fp32", "bf16", *(("fp8",) if name not in ("sm_80", "gfx90a") else ())):
            given = {"x": of(dtype, (rows, 512)), "w": of(dtype, (16, 256, 512)), "counts": of("int32", (16,))}
            problem = MOE.parse(OperationRequest("moe_gemm", given))
            assert MOE.candidates(problem, device), (rows, dtype)


def test_results_are_stored_through_a_map_that_ends_anywhere() -> None:
    device = device_of(tilewright_arch.load("sm_90a"))
    given = {"x": of("bf16", (512, 512)), "w": of("bf16", (16, 256, 512)), "counts": of("int32", (16,))}
    problem = MOE.parse(OperationRequest("moe_gemm", given))
    config = next(item for item in MOE.candidates(problem, device) if item.pipeline == "ws")
    plan = MOE.plan(problem, config, device)
    assert ExecutionPlan.from_dict(plan.to_dict(), {"moe_gemm": MoeConfig}) == plan
    maps = {item.operand: item for _, item in pack(plan.stages[0].args).maps}
    out, height = maps["out"], config.tile[0]
    assert out.sizes == (256, height, 512 + height) and out.strides == (512, 512) and out.offset == -height * 512
    # A tile that begins at row s has r rows left: it is stored from row height - r of dimension 1 on.
    for first, left in ((0, 1), (0, height), (511, 1), (37, height - 1)):
        row, place = height - left, first + left
        assert place < out.sizes[2] and out.offset + (row + place) * 512 == first * 512


def test_a_table_of_experts_has_room_beside_the_stages() -> None:
    device = device_of(tilewright_arch.load("sm_90a"))
    for experts in (8, 256, 1024):
        shapes = {"x": of("bf16", (experts * 100, 512)), "w": of("bf16", (experts, 256, 512))}
        given = {**shapes, "counts": of("int32", (experts,))}
        problem = MOE.parse(OperationRequest("moe_gemm", given))
        special = [item for item in MOE.candidates(problem, device) if item.pipeline == "ws"]
        assert special
        for config in special:
            stage = MOE.plan(problem, config, device).stages[0]
            assert stage.geometry.shared_bytes <= device.arch.lds_bytes
    many = {"x": of("bf16", (2000, 64)), "w": of("bf16", (1025, 64, 64)), "counts": of("int32", (1025,))}
    found = MOE.candidates(MOE.parse(OperationRequest("moe_gemm", many)), device)
    assert all(item.pipeline != "ws" for item in found) and any(item.tile[0] == 16 for item in found)


@pytest.mark.parametrize("steps", [{}, {"activation": "swiglu"}], ids=["plain", "swiglu"])
def test_exchanges_of_ranges_have_room_behind_the_table(steps: dict[str, str]) -> None:
    device = device_of(tilewright_arch.load("sm_90a"))
    for experts, rows in ((8, 8), (256, 20), (1024, 64)):
        shapes = {"x": of("bf16", (experts * rows, 512)), "w": of("bf16", (experts, 512, 512))}
        words = {"out_scale_block": "1x128", **steps}
        problem = MOE.parse(OperationRequest("moe_gemm", {**shapes, "counts": of("int32", (experts,))}, {}, words))
        special = [item for item in MOE.candidates(problem, device) if item.pipeline == "ws"]
        assert special
        for config in special:
            shared = MOE.plan(problem, config, device).stages[0].geometry.shared_bytes
            behind = shared_bytes(config, device.arch) + -(-(experts + 1) * 8 // 16) * 16
            assert shared == behind + 2 * 4 * config.waves * config.tile[0] * 4 <= device.arch.lds_bytes


def test_pairs_of_workgroups_load_half_of_the_rows_each() -> None:
    device = device_of(tilewright_arch.load("sm_90a"))
    given = {"x": of("bf16", (4096, 512)), "w": of("bf16", (16, 768, 512)), "counts": of("int32", (16,))}
    problem = MOE.parse(OperationRequest("moe_gemm", given))
    config = next(item for item in MOE.candidates(problem, device) if item.pipeline == "ws" and not item.promote)
    config = config.replace(scheduler="cooperative", num_wave_groups=1, tile=(128, 128, 64), wave=(2, 1, 1))
    config = config.replace(warp_tile=(64, 128, 16), transpose_c=False, stages=0)
    pair = config.replace(cluster=(1, 2, 1))
    assert MOE.rules.allows(config, device.arch) and MOE.rules.allows(pair, device.arch)
    plans = [MOE.plan(problem, item, device).stages[0] for item in (config, pair)]
    assert [plan.geometry.cluster for plan in plans] == [(1, 1, 1), (2, 1, 1)]
    assert plans[1].geometry.grid[0] % 2 == 0
    boxes = [{item.operand: item.box for _, item in pack(plan.args).maps} for plan in plans]
    assert boxes[1]["x"][1] * 2 == boxes[0]["x"][1] and boxes[1]["w"] == boxes[0]["w"]
    assert list(plan_findings(MOE, problem, pair, device)) == []
    for cluster in ((2, 1, 1), (1, 4, 1)):
        found = MOE.rules.check(config.replace(cluster=cluster), device.arch)
        assert "pairs" in {item.rule for item in found}


def test_rows_of_about_128_have_flat_tiles_where_blocks_have_factors() -> None:
    device = device_of(tilewright_arch.load("sm_90a"))
    for steps in ({}, {"activation": "swiglu"}, {"activation": "swiglu", "out_scale_block": "1x128"}):
        shapes = {"x": of("fp8", (32768, 7168)), "w": of("fp8", (256, 4096, 7168)), "counts": of("int32", (256,))}
        scales = {"scale_x": of("fp32", (32768, 56)), "scale_w": of("fp32", (256, 32, 56))}
        words = {
            "scale_block": "1x128_128x128",
            **({} if "out_scale_block" in steps else {"out_dtype": "bf16"}),
            **steps,
        }
        problem = MOE.parse(OperationRequest("moe_gemm", shapes | scales, {}, words))
        special = [item for item in MOE.candidates(problem, device) if item.pipeline == "ws"]
        best = min(special, key=lambda item: MOE.predict(problem, item, device).seconds)
        assert (best.tile[:2], best.transpose_c) == ((64, 256), False)


class Overrunning(MoeGemm):
    """Plans whose map of the result goes on behind it."""

    def plan(self, problem: MoeProblem, config: MoeConfig, device: DeviceInfo) -> ExecutionPlan:  # type: ignore[override]
        made = plan_moe(problem, config, device)
        (stage,) = made.stages
        fields = [
            replace(field, sizes=(*field.sizes[:2], field.sizes[2] + 1))
            if isinstance(field, TensorMap) and field.operand == "out"
            else field
            for field in stage.args.fields
        ]
        return replace(made, stages=(replace(stage, args=Struct(tuple(fields))),))


def test_a_map_that_goes_on_behind_the_result_is_found() -> None:
    device = device_of(tilewright_arch.load("sm_90a"))
    given = {"x": of("bf16", (512, 512)), "w": of("bf16", (16, 256, 512)), "counts": of("int32", (16,))}
    problem = MOE.parse(OperationRequest("moe_gemm", given))
    config = next(item for item in MOE.candidates(problem, device) if item.pipeline == "ws")
    assert list(plan_findings(MOE, problem, config, device)) == []
    found = list(plan_findings(Overrunning(), problem, config, device))
    assert len(found) == 1 and "'out'" in found[0] and "outside" in found[0]

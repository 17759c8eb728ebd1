"""Plans: the argument block is ``tw_gemm_args`` field for field, and stages are what the problem needs."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from kernel_structs import CpuLaunch, OperandArgs, ProductArgs, declared_fields

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.plugin import GemmOperation, PackBOperation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import WORKSPACE, ExecutionPlan, pack
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.types.tensor import TensorDesc

GEMM, PACK_B = GemmOperation(), PackBOperation()
of = TensorDesc.of


@pytest.mark.parametrize(
    ("struct", "mirror"),
    [("tw_gemm_operand", OperandArgs), ("tw_gemm_problem", ProductArgs), ("tw_gemm_args", CpuLaunch)],
)
def test_the_mirror_has_the_fields_of_the_header(struct: str, mirror: Any) -> None:
    assert [name for name, _ in mirror._fields_] == declared_fields(struct, "gemm.h")


def plan_of(
    device: DeviceInfo, inputs: dict[str, TensorDesc], outputs: dict[str, TensorDesc] | None = None, **attributes: Any
) -> ExecutionPlan:
    problem = GEMM.parse(OperationRequest("gemm", inputs, outputs or {}, attributes))
    return GEMM.plan(problem, GEMM.candidates(problem, device)[0], device)


def bound(
    plan: ExecutionPlan, stage: int = 0
) -> tuple[CpuLaunch, list[ProductArgs], list[list[OperandArgs]], dict[str, int]]:
    """The block of a stage as a kernel would read it, operands at made-up addresses."""
    addresses = {item.name: 0x10000 * (index + 1) for index, item in enumerate(plan.operands)} | {WORKSPACE: 0x7000000}
    packed = pack(plan.stages[stage].args)
    block, base = bytearray(len(packed.template)), 0x5000
    packed.bind(addresses, block, base)
    args = CpuLaunch.from_buffer(block)
    size = ctypes.sizeof(ProductArgs)
    rows = [ProductArgs.from_buffer(block, args.problems - base + index * size) for index in range(args.count)]
    counts = len(plan.stages[stage].config.d)  # type: ignore[attr-defined]
    d = [
        [OperandArgs.from_buffer(block, row.d - base + i * ctypes.sizeof(OperandArgs)) for i in range(counts)]
        for row in rows
    ]
    return args, rows, d, addresses


def test_every_field_of_a_full_problem_is_where_the_kernel_reads_it(device: DeviceInfo) -> None:
    inputs = {
        "a": of("bf16", (3, 8, 16), (200, 20, 1)),
        "b": of("bf16", (3, 16, 12), (300, 1, 18)),
        "bias": of("fp32", (12,)),
        "d[0]": of("fp32", (3, 8, 12)),
        "d[1]": of("fp16", (8, 1)),
        "scale_a": of("fp32", (8,)),
        "scale_b": of("fp32", ()),
    }
    out = {"out": of("fp16", (3, 8, 12), (150, 14, 1))}
    plan = plan_of(device, inputs, out, alpha=0.5, unary="Clamp", clamp_lo=-1, clamp_hi=2)
    args, (row,), ((first, second),), at = bound(plan)
    assert (args.count, args.split_k, args.workspace_bytes) == (1, 1, plan.workspace_bytes)
    assert args.workspace == (at[WORKSPACE] if plan.workspace_bytes else 0)
    assert (row.a, row.b, row.c) == (at["a"], at["b"], at["out"])
    assert (row.m, row.n, row.k, row.batch) == (8, 12, 16, 3)
    assert (row.lda, row.ldb, row.ldc) == (20, 18, 14)
    assert (row.stride_a, row.stride_b, row.stride_c) == (200, 300, 150)
    assert (row.alpha, row.clamp_lo, row.clamp_hi) == (0.5, -1.0, 2.0)
    assert (row.scale_a.ptr, row.scale_a.row_stride, row.scale_a.batch_stride) == (at["scale_a"], 1, 0)
    assert (row.scale_b.ptr, row.scale_b.col_stride) == (at["scale_b"], 0)
    assert (row.bias.ptr, row.bias.col_stride, row.bias.row_stride) == (at["bias"], 1, 0)
    assert (first.ptr, first.row_stride, first.col_stride, first.batch_stride) == (at["d[0]"], 12, 1, 96)
    assert (second.ptr, second.row_stride, second.col_stride, second.batch_stride) == (at["d[1]"], 1, 0, 0)


def test_groups_are_rows_of_one_table_and_empty_ones_are_left_out(device: DeviceInfo) -> None:
    inputs = {}
    for group, (m, n, k) in enumerate([(4, 5, 6), (0, 5, 6), (7, 8, 0)]):
        inputs |= {f"a[{group}]": of("fp32", (m, k)), f"b[{group}]": of("fp32", (k, n))}
    plan = plan_of(device, inputs, groups=3)
    args, rows, _, at = bound(plan)
    assert args.count == 2
    assert [(row.m, row.n, row.k) for row in rows] == [(4, 5, 6), (7, 8, 0)]
    assert [row.c for row in rows] == [at["out[0]"], at["out[2]"]]


def test_split_k_has_two_stages_and_room_for_partial_sums(device: DeviceInfo) -> None:
    inputs = {"a": of("fp32", (8, 9000)), "b": of("fp32", (9000, 12))}
    plan = plan_of(device, inputs, split_k=4)
    assert [stage.role for stage in plan.stages] == ["partial", "reduce"]
    args, *_ = bound(plan)
    assert args.split_k == 4 and plan.workspace_bytes >= 4 * 8 * 12 * 4
    short = plan_of(device, {"a": of("fp32", (8, 100)), "b": of("fp32", (100, 12))}, split_k=4)
    assert [stage.role for stage in short.stages] == ["main"] and short.notes


def test_nothing_to_write_means_no_stages(device: DeviceInfo) -> None:
    plan = plan_of(device, {"a": of("fp32", (0, 16)), "b": of("fp32", (16, 12))})
    assert plan.stages == () and plan.workspace_bytes == 0


def test_k_of_zero_still_runs_the_epilogue(device: DeviceInfo) -> None:
    plan = plan_of(device, {"a": of("fp32", (3, 0)), "b": of("fp32", (0, 12)), "bias": of("fp32", (12,))})
    assert [stage.role for stage in plan.stages] == ["main"]


def test_teams_follow_the_kernels_waves(device: DeviceInfo) -> None:
    problem = GEMM.parse(OperationRequest("gemm", {"a": of("fp32", (512, 512)), "b": of("fp32", (512, 512))}))
    for config in GEMM.candidates(problem, device):
        assert [stage.geometry.team for stage in GEMM.plan(problem, config, device).stages] == [config.waves]
        assert config.waves <= device.units


def test_packing_states_its_format_in_the_plan(device: DeviceInfo) -> None:
    problem = PACK_B.parse(OperationRequest("gemm_pack_b", {"b": of("fp32", (100, 70))}, {}, {"m": 64}))
    config = PACK_B.candidates(problem, device)[0]
    plan = PACK_B.plan(problem, config, device)
    out = next(item.desc for item in plan.operands if item.role is Role.OUTPUT)
    assert out.packing == f"bpanel-fp32-nr{config.warp_tile[1]}-vk1" and out.packed_bytes > 100 * 70 * 4
    assert [stage.role for stage in plan.stages] == ["pack_b"]
    again = PACK_B.parse(OperationRequest("gemm_pack_b", {"b": of("fp32", (100, 70))}, {"out": out}))
    assert PACK_B.candidates(again, device) and again.packing is not None


def test_an_output_may_be_the_very_tensor_that_is_added(device: DeviceInfo) -> None:
    d = TensorDesc.of("fp32", (8, 12))
    inputs = {"a": TensorDesc.of("fp32", (8, 16)), "b": TensorDesc.of("fp32", (16, 12)), "c": d, "d[0]": d}
    inputs["d[1]"] = TensorDesc.of("fp32", (1, 12))
    pairs = plan_of(device, inputs).details["in_place"]
    assert sorted(pairs) == [["out", "c"], ["out", "d[0]"]]
    grouped = {f"{name}[{group}]": desc for group in range(2) for name, desc in inputs.items() if name in "abc"}
    assert sorted(plan_of(device, grouped).details["in_place"]) == [["out[0]", "c[0]"], ["out[1]", "c[1]"]]


def test_a_plan_comes_back_from_json(device: DeviceInfo) -> None:
    plan = plan_of(device, {"a": of("fp32", (8, 16)), "b": of("fp32", (16, 12))}, unary="Clamp", clamp_lo=0.0)
    assert ExecutionPlan.from_dict(plan.to_dict(), {"gemm": GemmConfig}).to_dict() == plan.to_dict()

"""Plans for CUDA devices: the kernel's parameter byte for byte, tensor maps, grids, workspace and counters."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
from cuda_units import HAVE_NVRTC, WITHOUT_NVRTC, compile_text, statement_of
from kernel_structs import GpuLaunch, OperandArgs, ProductArgs

import tilewright_arch
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.launch.geometry import tiles_of
from tilewright_gemm.pipelines.candidates import with_signature
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.conformance.check_plugin import device_of, plan_findings
from tilewright_kit.contract.arguments import MAP_BYTES
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import COUNTERS, WORKSPACE, ExecutionPlan, PackedArgs, pack
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

GEMM = GemmOperation()
of = TensorDesc.of
WS = GemmConfig(
    dtype_a=DType.BF16,
    pipeline="ws",
    scheduler="cooperative",
    persistent=True,
    tile=(128, 256, 64),
    wave=(2, 1, 1),
    warp_tile=(64, 256, 16),
)
SWAPPED = WS.replace(tile=(16, 128, 64), wave=(1, 2, 1), warp_tile=(16, 64, 16), transpose_c=True, persistent=False)
PORTABLE = GemmConfig(dtype_a=DType.BF16, tile=(128, 128, 32), wave=(2, 2, 1), warp_tile=(16, 8, 16), stages=4)


class Task(ctypes.Structure):
    """``TaskProblem``."""

    _fields_ = (*ProductArgs._fields_, ("first_tile", ctypes.c_int64))


@pytest.fixture(scope="module")
def hopper() -> DeviceInfo:
    return device_of(tilewright_arch.load("sm_90a"))


def matrices(
    m: int, n: int, k: int, dtype: str = "bf16", layout: str = "rcr", batch: tuple[int, ...] = ()
) -> dict[str, TensorDesc]:
    """A and B, contiguous."""

    def one(rows: int, cols: int, letter: str) -> TensorDesc:
        plain = of(dtype, (*batch, rows, cols))
        if letter == "r":
            return plain
        return of(dtype, plain.shape, (*plain.strides[:-2], 1, rows))

    return {"a": one(m, k, layout[0]), "b": one(k, n, layout[1])}


def problem_of(inputs: dict[str, TensorDesc], outputs: dict[str, TensorDesc] | None = None, **more: Any) -> GemmProblem:
    return GEMM.parse(OperationRequest("gemm", inputs, outputs or {}, more))


def planned(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> ExecutionPlan:
    """The plan of a kernel made to fit the problem's signature, checked as the conformance test does."""
    fitted = with_signature(problem, config)
    assert not GEMM.rules.check(fitted, device.arch), GEMM.rules.check(fitted, device.arch)
    assert not GEMM.mismatches(problem, fitted, device), GEMM.mismatches(problem, fitted, device)
    assert not list(plan_findings(GEMM, problem, fitted, device))
    return GEMM.plan(problem, fitted, device)


def bound(plan: ExecutionPlan) -> tuple[bytearray, PackedArgs, dict[str, int]]:
    """The parameter as a kernel would see it, operands at made-up addresses, tables at 2**40."""
    names = [*(item.name for item in plan.operands), WORKSPACE, COUNTERS]
    addresses = {name: 0x100000 * (index + 1) for index, name in enumerate(names)}
    packed = pack(plan.stages[0].args)
    block = bytearray(len(packed.template))
    packed.bind(addresses, block, 1 << 40)
    return block, packed, addresses


FULL = matrices(40, 96, 64, batch=(3,)) | {
    "bias": of("fp32", (96,)),
    "d[0]": of("bf16", (3, 40, 96)),
    "d[1]": of("fp32", (40, 1)),
    "scale_a": of("fp32", (40,)),
    "scale_b": of("fp32", ()),
}


@pytest.mark.parametrize(("config", "maps"), [(PORTABLE, 0), (WS, 3)], ids=["portable", "ws"])
def test_every_field_of_a_task_is_where_the_kernel_reads_it(config: GemmConfig, maps: int, hopper: DeviceInfo) -> None:
    problem = problem_of(FULL, alpha=0.5, unary="Clamp", clamp_lo=-1, clamp_hi=2)
    plan = planned(problem, config, hopper)
    block, packed, at = bound(plan)
    assert packed.root_bytes == len(packed.template)
    launch = GpuLaunch.from_buffer(block)
    assert (launch.tasks, launch.count, launch.split_k, launch.workspace, launch.counters) == (0, 1, 1, 0, 0)
    assert launch.tiles == math.prod(plan.stages[0].geometry.grid) or config.persistent
    task = Task.from_buffer(block, 64 + maps * MAP_BYTES)
    assert (task.a, task.b, task.c, task.d) == (at["a"], at["b"], at["out"], 0)
    assert (task.m, task.n, task.k, task.batch) == (40, 96, 64, 3)
    assert (task.lda, task.ldb, task.ldc) == (64, 64, 96)
    assert (task.stride_a, task.stride_b, task.stride_c) == (40 * 64, 64 * 96, 40 * 96)
    assert (task.alpha, task.clamp_lo, task.clamp_hi, task.first_tile) == (0.5, -1.0, 2.0, 0)
    assert (task.scale_a.ptr, task.scale_a.row_stride, task.bias.ptr, task.bias.col_stride) == (
        at["scale_a"],
        1,
        at["bias"],
        1,
    )
    first, second = (OperandArgs.from_buffer(block, 64 + maps * MAP_BYTES + 240 + 32 * i) for i in range(2))
    assert (first.ptr, first.row_stride, first.batch_stride) == (at["d[0]"], 96, 40 * 96)
    assert (second.ptr, second.row_stride, second.col_stride) == (at["d[1]"], 1, 0)
    assert [offset for offset, _ in packed.maps] == [64 + MAP_BYTES * index for index in range(maps)]


@pytest.mark.skipif(not HAVE_NVRTC, reason=WITHOUT_NVRTC)
@pytest.mark.parametrize("config", [PORTABLE, WS], ids=["portable", "ws"])
def test_the_parameter_has_the_layout_that_the_compiler_gives_it(config: GemmConfig, hopper: DeviceInfo) -> None:
    groups = {f"{name}[{g}]": desc for g in range(2) for name, desc in matrices(40, 96, 64).items()}
    checks = []
    for number, problem in enumerate(
        (problem_of(matrices(40, 96, 64)), problem_of(FULL), problem_of(groups), problem_of(groups | _d(2)))
    ):
        plan = planned(problem, config, hopper)
        block, packed, _ = bound(plan)
        fitted = plan.stages[0].config
        assert isinstance(fitted, GemmConfig)
        size = Task.first_tile.offset + 8 + 32 * problem.num_d + MAP_BYTES * (3 if config.pipeline == "ws" else 0)
        size = -(-size // 64) * 64 if config.pipeline == "ws" else size
        if problem.grouped:
            assert len(block) == -(-packed.root_bytes // 64) * 64 + 2 * size
        checks.append(
            statement_of(
                fitted,
                hopper.arch,
                number,
                f'static_assert(sizeof(tw::GemmParams<Config>) == {packed.root_bytes}, "root");\n'
                f'static_assert(sizeof(tw::GemmTaskOf<Config>) == {size}, "task");\n'
                f'static_assert(sizeof(tw_gemm_problem) == {Task.first_tile.offset}, "problem");\n'
                f'static_assert(sizeof(tw_gemm_launch) == {ctypes.sizeof(GpuLaunch)}, "launch");',
            )
        )
    headers = ("tilewright/gpu/gemm/gemm.hpp", "tilewright/sm90/gemm/plan.hpp")
    assert compile_text("\n".join(checks), hopper.arch, headers) == ""


def _d(groups: int) -> dict[str, TensorDesc]:
    return {f"d[{g}][0]": of("bf16", (40, 96)) for g in range(groups)}


def test_groups_are_a_table_in_device_memory_with_running_tile_numbers(hopper: DeviceInfo) -> None:
    sizes = [(300, 512, 64), (0, 512, 64), (128, 256, 128), (1, 1000, 64)]
    inputs = {f"{name}[{g}]": d for g, size in enumerate(sizes) for name, d in matrices(*size).items()}
    problem = problem_of(inputs, groups=4)
    for config, maps in ((PORTABLE, 0), (WS, 3), (WS.replace(cluster=(2, 1, 1)), 3)):
        plan = planned(problem, config, hopper)
        block, packed, at = bound(plan)
        launch = GpuLaunch.from_buffer(block)
        assert packed.root_bytes == 64 and launch.tasks == (1 << 40) + 64 and launch.count == 3
        size = 640 if maps else 240
        tasks = [Task.from_buffer(block, 64 + index * size + maps * MAP_BYTES) for index in range(3)]
        assert [task.m for task in tasks] == [300, 128, 1] and [task.c for task in tasks] == [
            at["out[0]"],
            at["out[2]"],
            at["out[3]"],
        ]
        own = [tiles_of(product, config) for product in problem.products if not product.is_empty]
        assert [task.first_tile for task in tasks] == [0, own[0], own[0] + own[1]] and launch.tiles == sum(own)
        assert [(offset - 64) % size for offset, _ in packed.maps] == [0, 128, 256] * (3 if maps else 0)


@pytest.mark.parametrize("layout", ["rcr", "rrr", "crr", "ccr"])
@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1), (1, 2, 1)])
def test_maps_describe_the_operands_as_they_lie(layout: str, cluster: tuple[int, int, int], hopper: DeviceInfo) -> None:
    m, n, k = 304, 520, 72
    plan = planned(problem_of(matrices(m, n, k, layout=layout)), WS.replace(cluster=cluster), hopper)
    a, b, c = (item for _, item in pack(plan.stages[0].args).maps)
    assert (a.operand, b.operand, c.operand) == ("a", "b", "out")
    if layout[0] == "r":
        assert (a.sizes, a.strides[0], a.box) == ((k, m, 1), 2 * k, (64, 128 // cluster[1], 1))
    else:
        assert (a.sizes, a.strides[0], a.box) == ((m, k, 1), 2 * m, (64, 64, 1))
    if layout[1] == "c":
        assert (b.sizes, b.strides[0], b.box) == ((k, n, 1), 2 * k, (64, 256 // cluster[0], 1))
    else:
        assert (b.sizes, b.strides[0], b.box) == ((n, k, 1), 2 * n, (64, 64, 1))
    assert (c.sizes, c.strides[0], c.box) == ((n, m, 1), 2 * n, (64, 64, 1))
    assert {item.swizzle for item in (a, b, c)} == {128}


def test_batches_are_the_third_dimension_unless_they_broadcast(hopper: DeviceInfo) -> None:
    inputs = matrices(64, 256, 128, batch=(5,)) | {"b": of("bf16", (128, 256), (1, 128))}
    inputs["a"] = of("bf16", (5, 64, 128), (64 * 136, 136, 1))
    inputs["d[0]"] = of("bf16", (5, 64, 256))  # keeps the batch from becoming rows
    a, b, c = (m for _, m in pack(planned(problem_of(inputs), WS, hopper).stages[0].args).maps)
    assert (a.sizes, a.strides) == ((128, 64, 5), (272, 64 * 272)) or (a.sizes, a.strides[0]) == ((128, 320, 1), 272)
    assert b.sizes[2] == 1
    both = matrices(64, 256, 128, batch=(5,))
    a, b, c = (m for _, m in pack(planned(problem_of(both), WS, hopper).stages[0].args).maps)
    assert [item.sizes[2] for item in (a, b, c)] == [5, 5, 5]
    assert (a.strides[1], b.strides[1], c.strides[1]) == (64 * 128 * 2, 128 * 256 * 2, 64 * 256 * 2)


def test_transposed_kernels_store_all_rows_of_a_few_columns(hopper: DeviceInfo) -> None:
    problem = problem_of(matrices(16, 512, 256))
    c = pack(planned(problem, SWAPPED, hopper).stages[0].args).maps[2][1]
    assert c.box == (64, 16, 1) and c.sizes == (512, 16, 1)
    wide = problem_of(matrices(16, 512, 256), out_dtype="fp32")
    assert pack(planned(wide, SWAPPED, hopper).stages[0].args).maps[2][1].box == (32, 16, 1)


def test_threads_that_store_need_no_map_of_the_result(hopper: DeviceInfo) -> None:
    out = {"out": of("bf16", (304, 520), (523, 1))}
    problem = problem_of(matrices(304, 520, 72), out)
    plan = planned(problem, WS.replace(epilogue=Epilogue.DEFAULT), hopper)
    packed = pack(plan.stages[0].args)
    assert [item.operand for _, item in packed.maps] == ["a", "b"] and packed.root_bytes == 64 + 640
    assert plan.details["alignment"] == {"a": 16, "b": 16, "out": 2}


def test_a_single_row_may_claim_any_stride(hopper: DeviceInfo) -> None:
    problem = problem_of(matrices(1, 512, 100, layout="rrr"))
    a, *_ = (item for _, item in pack(planned(problem, SWAPPED, hopper).stages[0].args).maps)
    assert a.sizes == (100, 1, 1) and a.strides[0] == 208


@pytest.mark.parametrize(
    ("config", "sizes", "tiles", "grid"),
    [
        (PORTABLE, (300, 504, 64), 12, 12),
        (PORTABLE.replace(split_k=4), (300, 504, 1024), 12, 48),
        (PORTABLE.replace(persistent=True), (4096, 4096, 64), 1024, 132),
        (WS, (300, 504, 64), 6, 6),
        (WS, (4096, 4096, 64), 512, 132),
        (WS.replace(cluster=(2, 1, 1)), (300, 504, 64), 8, 8),
        (WS.replace(cluster=(1, 2, 1)), (104, 104, 64), 2, 2),
        (WS.replace(cluster=(2, 2, 1)), (4096, 4096, 64), 512, 132),
        (WS.replace(split_k=3), (300, 504, 1024), 6, 18),
        (WS.replace(reduction=Reduction.LINEAR), (4096, 4096, 1024), 512, 132),
        (SWAPPED.replace(split_k=4), (16, 4096, 4096), 32, 128),
    ],
)
def test_grids_are_tiles_times_slices_or_what_runs_at_a_time(
    config: GemmConfig, sizes: tuple[int, int, int], tiles: int, grid: int, hopper: DeviceInfo
) -> None:
    plan = planned(problem_of(matrices(*sizes)), config, hopper)
    geometry = plan.stages[0].geometry
    block, _, _ = bound(plan)
    assert GpuLaunch.from_buffer(block).tiles == tiles
    assert geometry.grid == (grid, 1, 1)
    assert geometry.cluster == (math.prod(config.cluster), 1, 1)
    assert geometry.block[0] == (128 if config.pipeline == "compv4" else 384)
    assert 0 < geometry.shared_bytes <= hopper.arch.lds_bytes
    assert geometry.dependent == (config.pipeline == "ws")


def test_units_that_do_not_fill_a_cluster_stay_idle(hopper: DeviceInfo) -> None:
    odd = DeviceInfo("cuda:0", "cuda", "odd", hopper.arch, 115, 1 << 30)
    problem = problem_of(matrices(4096, 4096, 64))
    assert planned(problem, WS.replace(cluster=(2, 1, 1)), odd).stages[0].geometry.grid == (114, 1, 1)
    assert planned(problem, WS.replace(cluster=(2, 2, 1)), odd).stages[0].geometry.grid == (112, 1, 1)


def test_partial_tiles_and_counters_have_room(hopper: DeviceInfo) -> None:
    problem = problem_of(matrices(300, 504, 1024))
    for config in (PORTABLE.replace(split_k=4), WS.replace(split_k=4), WS.replace(split_k=4, cluster=(2, 1, 1))):
        plan = planned(problem, config, hopper)
        tiles = tiles_of(problem.products[0], config)
        assert plan.workspace_bytes == tiles * 4 * config.tile[0] * config.tile[1] * 4
        assert plan.counter_bytes == tiles * 4
        block, _, at = bound(plan)
        launch = GpuLaunch.from_buffer(block)
        assert (launch.workspace, launch.counters) == (at[WORKSPACE], at[COUNTERS])
        assert (launch.split_k, launch.workspace_bytes) == (4, plan.workspace_bytes)
    few = problem_of(matrices(16, 512, 4096))
    for split in (2, 8):
        cluster = SWAPPED.replace(split_k=split, cluster=(1, 1, split))
        plan = planned(few, cluster, hopper)
        assert plan.workspace_bytes == plan.counter_bytes == 0
        assert plan.stages[0].geometry.grid[0] == 4 * split and plan.stages[0].geometry.cluster == (split, 1, 1)
        short = planned(problem_of(matrices(16, 512, 64)), cluster, hopper)
        assert GpuLaunch.from_buffer(bound(short)[0]).split_k == split  # empty slices run too
    stream = planned(problem, WS.replace(reduction=Reduction.LINEAR), hopper)
    assert stream.workspace_bytes == 132 * 2 * 128 * 256 * 4 and stream.counter_bytes == 6 * 4
    plain = planned(problem, WS, hopper)
    assert plain.workspace_bytes == plain.counter_bytes == 0


def test_a_short_k_has_fewer_slices_than_the_kernel_may_take(hopper: DeviceInfo) -> None:
    plan = planned(problem_of(matrices(128, 256, 130, layout="rrr")), PORTABLE.replace(split_k=32), hopper)
    block, _, _ = bound(plan)
    assert GpuLaunch.from_buffer(block).split_k == 5 and plan.notes
    assert plan.workspace_bytes == 2 * 5 * 128 * 128 * 4


def test_alignment_says_what_every_address_needs(hopper: DeviceInfo) -> None:
    problem = problem_of(matrices(64, 256, 64) | {"bias": of("fp32", (256,))})
    assert planned(problem, WS, hopper).details["alignment"] == {"a": 16, "b": 16, "bias": 4, "out": 16}
    assert planned(problem, PORTABLE, hopper).details["alignment"] == {"a": 2, "b": 2, "bias": 4, "out": 2}


def test_nothing_to_write_means_no_stages(hopper: DeviceInfo) -> None:
    plan = planned(problem_of(matrices(0, 256, 64)), PORTABLE, hopper)
    assert plan.stages == () and plan.workspace_bytes == plan.counter_bytes == 0


def test_plans_come_back_from_json(hopper: DeviceInfo) -> None:
    for config in (WS.replace(split_k=2), PORTABLE):
        plan = planned(problem_of(FULL), config, hopper)
        assert ExecutionPlan.from_dict(plan.to_dict(), {"gemm": GemmConfig}).to_dict() == plan.to_dict()

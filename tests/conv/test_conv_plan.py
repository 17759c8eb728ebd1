"""Plans: argument blocks are those of the headers field for field, and products gather what the definition says."""

from __future__ import annotations

import ctypes
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from conv_cases import FIRST, LAST, SMALL, Case
from conv_runner import ConvRunner
from conv_truth import CONVS, planned
from kernel_structs import CpuLaunch, GpuLaunch, OperandArgs, ProductArgs, declared_fields

import tilewright_arch
from tilewright_grouped_conv.config.config import CONFIGS, ConvConfig
from tilewright_grouped_conv.launch.fast_divmod import divisor
from tilewright_grouped_conv.plan.plan import plan_conv
from tilewright_grouped_conv.problem.implicit_gemm import phases_of
from tilewright_grouped_conv.problem.sizes import ConvGeometry, output_size
from tilewright_grouped_conv.strided_copy.config import TransformConfig
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import COUNTERS, WORKSPACE, ExecutionPlan, Stage, pack
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

FWD, DATA, WEIGHT = Direction
CORE = Path(__file__).resolve().parents[2] / "native" / "include" / "tilewright" / "core"


class DivisorArgs(ctypes.Structure):
    _fields_ = (("multiplier", ctypes.c_int64), ("shift", ctypes.c_int64))


class AxisArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "size", "taps", "row_step", "tap_step", "origin")),
        *((name, ctypes.c_int64) for name in ("image_stride", "row_stride", "tap_stride")),
        ("by_rows", DivisorArgs),
        ("by_taps", DivisorArgs),
    )


class ConvArgs(ctypes.Structure):
    _fields_ = (
        ("gemm", ProductArgs),
        ("axes", AxisArgs * 3),
        *((name, ctypes.c_int64) for name in ("images", "groups", "channels", "image_n", "image_g", "image_c")),
        *((name, ctypes.c_int64) for name in ("row_n", "row_g", "row_c", "weight_g", "weight_n", "weight_c")),
        ("by_channels", DivisorArgs),
        ("by_groups", DivisorArgs),
        ("acc", ctypes.c_uint64),
    )


class CopyArgs(ctypes.Structure):
    _fields_ = (
        ("from", ctypes.c_uint64),
        ("to", ctypes.c_uint64),
        *((name, ctypes.c_int64 * 6) for name in ("sizes", "from_strides", "to_strides", "kept")),
    )


@pytest.mark.parametrize(
    ("struct", "header", "mirror"),
    [
        ("tw_gemm_operand", "gemm.h", OperandArgs),
        ("tw_gemm_problem", "gemm.h", ProductArgs),
        ("tw_gemm_launch", "gemm.h", GpuLaunch),
        ("tw_divisor", "conv.h", DivisorArgs),
        ("tw_conv_axis", "conv.h", AxisArgs),
        ("tw_conv_problem", "conv.h", ConvArgs),
        ("tw_conv_args", "conv.h", CpuLaunch),
        ("tw_transform_args", "strided_copy.h", CopyArgs),
    ],
)
def test_the_mirrors_have_the_fields_of_the_headers(struct: str, header: str, mirror: Any) -> None:
    assert [name for name, *_ in mirror._fields_] == declared_fields(struct, header)


def addresses_of(plan: ExecutionPlan) -> dict[str, int]:
    """Made-up addresses, apart from one another."""
    names = [item.name for item in plan.operands]
    return {name: 0x100000 * (index + 1) for index, name in enumerate([*names, WORKSPACE, COUNTERS])}


def block_of(plan: ExecutionPlan, stage: Stage) -> tuple[bytearray, int, dict[str, int]]:
    """A stage's argument block as a kernel would read it, where it lies, and where operands do."""
    at, base = addresses_of(plan), 0x5000
    packed = pack(stage.args)
    block = bytearray(len(packed.template))
    packed.bind(at, block, base)
    return block, base, at


def bound(plan: ExecutionPlan, index: int = 0) -> tuple[CpuLaunch, list[ConvArgs], dict[str, int]]:
    """The arguments of a CPU kernel."""
    block, base, at = block_of(plan, plan.stages[index])
    args = CpuLaunch.from_buffer(block)
    size = ctypes.sizeof(ConvArgs)
    return args, [ConvArgs.from_buffer(block, args.problems - base + i * size) for i in range(args.count)], at


FULL = Case(
    3, 12, 8, 2, (5, 9, 11), (2, 3, 1), stride=(1, 2, 3), dilation=(2, 1, 1), padding=(1, 0, 2, 0, 1, 1), name="full"
)


def test_every_field_of_a_forward_product_is_where_the_kernel_reads_it(device: DeviceInfo) -> None:
    of = TensorDesc.of
    more = {"bias": of("fp16", (8,)), "scale": of("fp32", (8,)), "d[0]": FULL.tensor("y", "fp32")}
    request = FULL.request(FWD, "fp8", more=more, out_dtype="fp32", alpha=0.5, unary="Clamp", clamp_lo=-1, clamp_hi=2)
    plan = planned(request, device).plan
    args, (row,), at = bound(plan)
    assert (args.count, args.split_k, args.workspace_bytes) == (1, 1, plan.workspace_bytes)
    x, w, y = (FULL.tensor(name, "fp32").strides for name in "xwy")
    gemm = row.gemm
    assert (gemm.a, gemm.b, gemm.c) == (at["x"], at["w"], at["y"])
    pixels = FULL.n * FULL.output[0] * FULL.output[1] * FULL.output[2]
    assert (gemm.m, gemm.n, gemm.k, gemm.batch) == (pixels, 4, 6 * 6, 2)
    assert (gemm.alpha, gemm.clamp_lo, gemm.clamp_hi) == (0.5, -1.0, 2.0)
    assert (gemm.scale_b.ptr, gemm.scale_b.col_stride, gemm.scale_b.batch_stride) == (at["scale"], 1, 4)
    assert (gemm.bias.ptr, gemm.bias.col_stride, gemm.bias.row_stride) == (at["bias"], 1, 0)
    assert gemm.scale_a.ptr == 0
    assert (gemm.ldc, gemm.stride_a, gemm.stride_b, gemm.stride_c) == (8, 6, 4 * w[0], 4)
    assert (row.images, row.groups, row.channels) == (3, 2, 6)
    assert (row.image_n, row.image_g, row.image_c) == (x[0], 6, 1)
    assert (row.row_n, row.row_g, row.row_c) == (y[0], 4, 1)
    assert (row.weight_g, row.weight_n, row.weight_c) == (4 * w[0], w[0], 1)
    for i, axis in enumerate(row.axes):
        assert (axis.rows, axis.size, axis.taps) == (FULL.output[i], FULL.size[i], FULL.filter[i])
        assert (axis.row_step, axis.tap_step) == (FULL.stride[i], FULL.dilation[i])
        assert axis.origin == -FULL.padding[i]
        assert (axis.image_stride, axis.row_stride) == (x[2 + i], y[2 + i])
        assert axis.tap_stride == (w[2 + i] if FULL.filter[i] > 1 else 0)
        assert (axis.by_rows.multiplier, axis.by_rows.shift) == divisor(axis.rows)
        assert (axis.by_taps.multiplier, axis.by_taps.shift) == divisor(axis.taps)
    assert row.acc == 0


def test_phases_of_backward_data_begin_at_their_own_pixels_and_taps(device: DeviceInfo) -> None:
    case = Case(2, 6, 8, 1, (7, 10), (3, 2), stride=(2, 3), padding=(1, 0, 1, 1))
    old = case.tensor("dx", "fp32")
    request = case.request(DATA, "fp32", more={"acc": old}, outputs={"dx": old}, accumulate=True)
    plan = planned(request, device).plan
    args, rows, at = bound(plan)
    assert args.count == len(rows) == 6
    x, w = old.strides, case.tensor("w", "fp32").strides
    for row, phase in zip(rows, planned(request, device).problem.phases(False), strict=True):
        first = sum(axis.first_row * step for axis, step in zip(phase.axes[1:], x[2:], strict=True))
        taps = sum(axis.first_tap * step for axis, step in zip(phase.axes[1:], w[2:], strict=True))
        assert (row.gemm.c, row.acc) == (at["dx"] + first * 4, at["acc"] + first * 4)
        assert (row.gemm.a, row.gemm.b) == (at["dy"], at["w"] + taps * 4)
        assert [axis.row_stride for axis in row.axes] == [0, 2 * x[2], 3 * x[3]]
        assert (row.weight_n, row.weight_c, row.channels) == (w[1], w[0], 8)
    assert sum(row.gemm.m for row in rows) == 2 * 7 * 10


def test_the_gradient_of_weights_takes_dy_as_the_left_operand(device: DeviceInfo) -> None:
    case = SMALL[4]
    plan = planned(case.request(WEIGHT, "fp16", out_dtype="fp32"), device).plan
    _, (row,), at = bound(plan)
    assert (row.gemm.a, row.gemm.b, row.gemm.c) == (at["dy"], at["x"], at["dw"])
    assert (row.gemm.m, row.gemm.n, row.gemm.k, row.gemm.batch) == (2, 6 * 3, 2 * 3 * 3, 5)
    dw = case.tensor("dw", "fp32").strides
    assert (row.weight_g, row.weight_n, row.weight_c) == (2 * dw[0], dw[0], 1)


def test_a_launch_on_a_gpu_is_its_head_and_then_its_tasks() -> None:
    device = DeviceInfo("cuda:0", "cuda", "imagined", tilewright_arch.load("sm_90a"), 132, 1 << 35)
    for direction, case in itertools.product(Direction, (SMALL[2], SMALL[4])):
        problem = CONVS[case.request(direction, "fp16").operation].parse(case.request(direction, "fp16"))
        config = gpu_config(direction, mapped=direction is DATA and max(case.stride) > 1)
        plan = plan_conv(problem, config, device)
        (stage,) = plan.stages
        block, base, _ = block_of(plan, stage)
        launch = GpuLaunch.from_buffer(block)
        phases = [phase for phase in problem.phases(False) if phase.m and phase.n]
        task = ctypes.sizeof(ConvArgs) + 8
        start = launch.tasks - base if launch.tasks else ctypes.sizeof(GpuLaunch)
        assert launch.count == len(phases) and bool(launch.tasks) == (config.mapped_rows)
        first = 0
        for index, phase in enumerate(phases):
            row = ConvArgs.from_buffer(block, start + index * task)
            assert (row.gemm.m, row.gemm.n, row.gemm.k) == (phase.m, phase.n, phase.k)
            assert int.from_bytes(block[start + index * task + 680 : start + (index + 1) * task], "little") == first
            first += -(-phase.m // 128) * -(-phase.n // 64) * phase.batch
        assert launch.tiles == first == stage.geometry.grid[0]


def gpu_config(direction: Direction, mapped: bool) -> ConvConfig:
    return CONFIGS[direction](
        pipeline="compv3",
        tile=(128, 64, 32),
        wave=(2, 2, 1),
        warp_tile=(16, 8, 16),
        vector_sizes=(1, 1, 1),
        mapped_rows=mapped,
    )


# ---- workspaces ----


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("direction", Direction, ids=str)
@pytest.mark.some(2)
@pytest.mark.extended
def test_workspace_formulas_agree_with_the_kernels_own(
    conv_runner: ConvRunner, device: DeviceInfo, direction: Direction, dtype: str
) -> None:
    big = Case(4, 70, 90, 1, (40, 41), (3, 3), padding=(1, 1, 1, 1))
    for case in (*SMALL[1:9:2], SMALL[5], SMALL[6], big):
        for order, split in itertools.product((LAST, FIRST), (0, 3)):
            if split and direction is DATA and max(case.stride) > 1:
                continue
            request = case.request(direction, dtype, order, **({"split_k": split} if direction is WEIGHT else {}))
            plan = planned(request, device).plan
            for stage in plan.stages:
                if not isinstance(stage.config, TransformConfig):
                    own = conv_runner.workspace(stage, plan)
                    assert own == stage.args.fields[3].value, (stage.config.name, case)  # type: ignore[union-attr]


# ---- what products gather ----


def pixels_seen(geometry: ConvGeometry, direction: Direction) -> set[tuple[int, int, int]]:
    """(pixel of x, pixel of y, tap) of every multiplication along the last axis."""
    found = set()
    for phase in phases_of(geometry, direction, False):
        axis = phase.axes[2]
        for row, tap in itertools.product(range(axis.rows), range(axis.taps)):
            at = axis.origin + row * axis.row_step + tap * axis.tap_step
            if 0 <= at < axis.size:
                real, weight = axis.first_row + row * axis.row_every, axis.first_tap + tap * axis.tap_every
                found.add((real, at, weight) if direction is DATA else (at, real, weight))
    return found


def test_all_directions_multiply_the_same_pixels() -> None:
    """Thousands of one-dimensional convolutions, against the definition."""
    rng = random.Random(4)
    counted = 0
    for _ in range(4000):
        size, taps, stride = rng.randint(1, 12), rng.randint(1, 5), rng.randint(1, 6)
        dilation, begin, end = rng.randint(1, 4), rng.randint(0, 4), rng.randint(0, 4)
        out = output_size(size, taps, stride, dilation, begin, end)
        if out <= 0:
            continue
        counted += 1
        one = (1, 1, 1)
        geometry = ConvGeometry(
            1, 1, 1, 1, 1, (1, 1, size), (1, 1, taps), (1, 1, out), (1, 1, stride), (1, 1, dilation),
            (0, 0, begin), (0, 0, end),
        )  # fmt: skip
        assert geometry.stride[:2] == one[:2]
        expected = {
            (row * stride - begin + tap * dilation, row, tap)
            for row in range(out)
            for tap in range(taps)
            if 0 <= row * stride - begin + tap * dilation < size
        }
        for direction in Direction:
            assert pixels_seen(geometry, direction) == expected, (geometry, direction)
        rows = [
            axis.first_row + row * axis.row_every
            for axis in (phase.axes[2] for phase in phases_of(geometry, DATA, False))
            for row in range(axis.rows)
        ]
        assert sorted(rows) == list(range(size))
    assert counted > 2000


def test_division_by_multiplication_is_exact() -> None:
    rng = random.Random(5)
    divisors = [*range(1, 130), 2**31 - 1, *(rng.randrange(1, 2**31) for _ in range(300)), *(2**i for i in range(31))]
    for d in divisors:
        multiplier, shift = divisor(d)
        edges = [q * d + r for q in (0, 1, 2**31 // d - 1, rng.randrange(2**31 // d + 1)) for r in (-1, 0, 1, d - 1)]
        for n in (*edges, 2**31 - 1, *(rng.randrange(2**31) for _ in range(20))):
            if 0 <= n < 2**31:
                assert n * multiplier < 2**63
                assert (n * multiplier) >> shift == n // d
    for d in (0, -3, 2**31):
        with pytest.raises(ValueError, match="divisor"):
            divisor(d)


def test_a_plan_comes_back_from_json(device: DeviceInfo) -> None:
    types = {item.operation: item for item in (*CONFIGS.values(), TransformConfig)}
    for direction in Direction:
        plan = planned(SMALL[4].request(direction, "bf16", FIRST), device).plan
        assert ExecutionPlan.from_dict(plan.to_dict(), types).to_dict() == plan.to_dict()


def test_nothing_to_write_means_no_stages(device: DeviceInfo) -> None:
    request = SMALL[2].with_(n=0).request(FWD, "fp32")
    assert isinstance(request, OperationRequest)
    plan = planned(request, device).plan
    assert not plan.stages and not plan.workspace_bytes


def test_split_images_are_launched_in_ranges_that_32_bits_reach() -> None:
    device = DeviceInfo("cuda:0", "cuda", "imagined", tilewright_arch.load("sm_90a"), 132, 1 << 37)
    case = Case(7, 16, 16, 1, (8, 8), (3, 3), padding=(1, 1, 1, 1))
    far = 2**30 // 3
    for direction in (FWD, DATA):
        request = case.request(direction, "fp16")
        gathered = "x" if direction is FWD else "dy"
        inputs = {**request.inputs, gathered: TensorDesc.of("fp16", (7, 16, 8, 8), (far, 1, 128, 16))}
        request = OperationRequest(request.operation, inputs, {}, request.attributes)
        problem = CONVS[request.operation].parse(request)
        config = gpu_config(direction, mapped=False)
        assert len(plan_conv(problem, config, device).stages) == 1
        plan = plan_conv(problem, config.replace(split_image=True), device)
        seen = []
        for stage in plan.stages:
            block, _, at = block_of(plan, stage)
            row = ConvArgs.from_buffer(block, ctypes.sizeof(GpuLaunch))
            output = next(item for item in plan.operands if item.name in ("y", "dx"))
            seen.append((row.images, (row.gemm.a - at[gathered]) // 2 // far))
            assert (row.gemm.c - at[output.name]) // 2 == sum(images for images, _ in seen[:-1]) * 16 * 64
            assert row.images * far < 2**31
        assert [first for _, first in seen] == list(itertools.accumulate([0, *(images for images, _ in seen[:-1])]))
        assert sum(images for images, _ in seen) == 7 and len(seen) == 2

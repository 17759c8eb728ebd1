"""Products of experts on the CPU: every count is right, and rows of no expert stay as they were."""

from __future__ import annotations

import ctypes

import pytest
from kernel_structs import OperandArgs, ProductArgs, declared_fields
from moe_runner import COLUMNS, MOE, SQUARES, MoeRunner, check, problem_of

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import pack
from tilewright_moe.problem import MoeProblem

COUNTS = ((0, 0, 0, 0), (37, 0, 0, 0), (0, 1, 36, 0), (9, 10, 2, 12), (1, 1, 1, 1))
WRONG = ((40, 1, 0, 0), (-5, 20, 30, 3), (2**31 - 1, 2**31 - 1, 2**31 - 1, 1), (-(2**31), 0, 0, 0), (36, 1, 1, 9))


def configs(problem: MoeProblem, device: DeviceInfo) -> list[object]:
    """One of each pipeline and scheduler, in one size of team and in another."""
    found = {(item.pipeline, item.scheduler, item.waves): item for item in MOE.candidates(problem, device)}
    return list(found.values())


@pytest.mark.parametrize("room", [False, True], ids=["sorted", "room"])
@pytest.mark.parametrize("counts", [*COUNTS, *WRONG], ids=str)
def test_every_count_is_right(runner: MoeRunner, device: DeviceInfo, counts: tuple[int, ...], room: bool) -> None:
    problem = problem_of("fp32", 4, 37, 41, 53, room=room, gap=3, expected_rows=5)
    found = configs(problem, device)
    assert len(found) >= 2
    for config in found:
        check(problem, config, device, counts, runner.run)


@pytest.mark.parametrize(("dtype", "out"), [("bf16", ""), ("fp16", "fp32"), ("fp8", "bf16"), ("bf16", "fp16")])
@pytest.mark.some(3)
def test_every_type_is_right(runner: MoeRunner, device: DeviceInfo, dtype: str, out: str) -> None:
    more = {"out_dtype": out} if out else {}
    for room in (False, True):
        problem = problem_of(dtype, 3, 70, 48, 64, room=room, alpha=0.5, **more)
        for config in configs(problem, device)[:2]:
            check(problem, config, device, (33, 0, 20), runner.run)


@pytest.mark.parametrize("block", [SQUARES, COLUMNS])
@pytest.mark.parametrize("room", [False, True], ids=["sorted", "room"])
def test_each_block_is_scaled_by_its_own_factor(runner: MoeRunner, device: DeviceInfo, block: str, room: bool) -> None:
    problem = problem_of("fp8", 3, 37, 141, 261, room=room, scale_block=block, out_dtype="fp32", alpha=0.5, gap=3)
    config = MOE.candidates(problem, device)[0]
    for counts in ((9, 0, 28), (37, 1, 9)):
        check(problem, config, device, counts, runner.run)


FUSED: dict[str, dict[str, str]] = {
    "swiglu": {"activation": "swiglu"},
    "fp8": {"out_scale_block": "1x128"},
    "swiglu-fp8": {"activation": "swiglu", "out_scale_block": "1x128"},
}


@pytest.mark.parametrize("steps", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("room", [False, True], ids=["sorted", "room"])
def test_steps_behind_the_sums_are_right(
    runner: MoeRunner, device: DeviceInfo, steps: dict[str, str], room: bool
) -> None:
    for dtype, more in (("bf16", {}), ("fp8", {"scale_block": SQUARES})):
        words = {**steps, **more} if "out_scale_block" in steps else {**steps, **more, "out_dtype": "bf16"}
        problem = problem_of(dtype, 3, 37, 168, 133, room=room, alpha=0.5, gap=3, **words)
        for counts in ((9, 0, 28), (37, 1, 9)):
            check(problem, MOE.candidates(problem, device)[0], device, counts, runner.run)


def test_blocks_of_zeros_have_factors(runner: MoeRunner, device: DeviceInfo) -> None:
    problem = problem_of("fp32", 2, 5, 24, 0, **FUSED["swiglu-fp8"])
    check(problem, MOE.candidates(problem, device)[0], device, (2, 1), runner.run)


def test_nothing_along_k_gives_zeros(runner: MoeRunner, device: DeviceInfo) -> None:
    problem = problem_of("fp32", 2, 5, 7, 0)
    check(problem, MOE.candidates(problem, device)[0], device, (2, 1), runner.run)


def test_many_experts_with_a_row_each(runner: MoeRunner, device: DeviceInfo) -> None:
    problem = problem_of("fp32", 300, 300, 16, 24)
    for config in configs(problem, device):
        check(problem, config, device, [1] * 300, runner.run)
        check(problem, config, device, [0] * 299 + [300], runner.run)


class MoeArgs(ctypes.Structure):
    """``tw_moe_args``."""

    _fields_ = (
        ("product", ProductArgs),
        *((name, ctypes.c_uint64) for name in ("counts", "scale_x", "scale_w")),
        ("scale_w_stride", ctypes.c_int64),
        ("status", ctypes.c_uint64),
        ("masked", ctypes.c_int64),
        ("workspace", ctypes.c_uint64),
        ("workspace_bytes", ctypes.c_int64),
        ("result_scales", OperandArgs),
    )


def test_arguments_are_the_struct_that_kernels_read(device: DeviceInfo) -> None:
    assert [name for name, *_ in MoeArgs._fields_] == declared_fields("tw_moe_args", "moe.h")
    problem = problem_of("bf16", 3, 20, 48, 64, room=True, alpha=0.25)
    plan = MOE.plan(problem, MOE.candidates(problem, device)[0], device)
    packed = pack(plan.stages[0].args)
    assert packed.root_bytes == ctypes.sizeof(MoeArgs)
    block = bytearray(packed.template)
    names = {name: 4096 * (place + 1) for place, name in enumerate((*(i.name for i in plan.operands), "workspace"))}
    packed.bind(names, block, 0)
    read = MoeArgs.from_buffer(block)
    assert (read.product.m, read.product.n, read.product.k, read.product.batch) == (20, 48, 64, 3)
    assert (read.product.lda, read.product.ldb, read.product.ldc) == (64, 64, 48)
    assert (read.product.stride_a, read.product.stride_b, read.product.stride_c) == (20 * 64, 48 * 64, 20 * 48)
    assert (read.product.alpha, read.masked, read.scale_w_stride) == (0.25, 1, 1)
    assert (read.product.a, read.product.b, read.product.c) == (names["x"], names["w"], names["out"])
    addresses = [names[name] for name in ("counts", "scale_x", "scale_w", "status", "workspace")]
    assert [read.counts, read.scale_x, read.scale_w, read.status, read.workspace] == addresses
    assert read.workspace_bytes == plan.workspace_bytes

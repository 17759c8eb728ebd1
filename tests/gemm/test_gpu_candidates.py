"""What is proposed for CUDA devices: few and good kernels, and a named reason for every other."""

from __future__ import annotations

from typing import Any

import pytest
from effort import calls_of

import tilewright_arch
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.packing import PackedFormat
from tilewright_gemm.pipelines.candidates import with_signature
from tilewright_gemm.plugin import GemmOperation, PackBOperation
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.selection.explain import explain
from tilewright_kit.selection.strategies import Heuristic, Selector
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError
from tilewright_kit.types.tensor import TensorDesc

GEMM = GemmOperation()
CALLS = 100_000
"""Of functions, for a plan that is new: that many take ten milliseconds."""
of = TensorDesc.of
SHAPES = (
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (16, 4096, 4096), (1, 4096, 4096),
    (64, 8192, 8192), (128, 28672, 4096), (4096, 14336, 4096), (8192, 8192, 28672), (333, 777, 1111), (1, 1, 1),
    (512, 512, 16384), (8192, 8, 8192), (128, 512, 0), (100000, 64, 64),
)  # fmt: skip


@pytest.fixture(scope="module")
def hopper() -> DeviceInfo:
    return device_of(tilewright_arch.load("sm_90a"))


@pytest.fixture(scope="module")
def ampere() -> DeviceInfo:
    return device_of(tilewright_arch.load("sm_80"))


def problem_of(m: int, n: int, k: int, dtype: str = "bf16", layout: str = "rcr", **attributes: Any) -> GemmProblem:
    inputs = {
        "a": of(dtype, (m, k), (k, 1) if layout[0] == "r" else (1, m)),
        "b": of(dtype, (k, n), (n, 1) if layout[1] == "r" else (1, k)),
    }
    return GEMM.parse(OperationRequest("gemm", inputs, {}, attributes))


def best(problem: GemmProblem, device: DeviceInfo) -> GemmConfig:
    config = Selector().select(GEMM, problem, device).config
    assert isinstance(config, GemmConfig)
    return config


def reasons(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> set[str]:
    return {item.rule for item in GEMM.mismatches(problem, with_signature(problem, config), device)}


WS = GemmConfig(
    dtype_a=DType.BF16,
    pipeline="ws",
    scheduler="cooperative",
    persistent=True,
    tile=(128, 256, 64),
    wave=(2, 1, 1),
    warp_tile=(64, 256, 16),
)
PORTABLE = GemmConfig(dtype_a=DType.BF16, tile=(128, 128, 32), wave=(2, 2, 1), warp_tile=(16, 8, 16), stages=4)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp8", "bf8", "int8"])
@pytest.mark.parametrize("layout", ["rcr", "rrr", "crr", "ccr"])
def test_every_type_and_layout_has_few_valid_kernels_in_a_fixed_order(
    dtype: str, layout: str, hopper: DeviceInfo, ampere: DeviceInfo
) -> None:
    for device in (hopper, ampere):
        if device.arch.acc_dtype(dtype, dtype) is None:
            continue
        for sizes in SHAPES[::3]:
            problem = problem_of(*sizes, dtype, layout)
            found = GEMM.candidates(problem, device)
            assert 1 <= len(found) <= 40, (sizes, len(found))
            assert found == GEMM.candidates(problem, device) and len(set(found)) == len(found)
            assert found[-1].pipeline in ("compv3", "compv4")
            assert all(GEMM.rules.allows(config, device.arch) for config in found)


def test_a_plan_that_is_not_cached_is_little_work(hopper: DeviceInfo) -> None:
    for sizes in SHAPES:
        problem = problem_of(*sizes)
        GEMM.plan(problem, best(problem, hopper), hopper)  # what is read and expanded once for a device
        problem = problem_of(*sizes)
        calls = calls_of(lambda asked=problem: GEMM.plan(asked, best(asked, hopper), hopper))  # type: ignore[misc]
        assert 0 < calls < CALLS, (sizes, calls)


@pytest.mark.parametrize("sizes", [size for size in SHAPES if size[1:] not in ((512, 0), (1, 1))], ids=str)
def test_aligned_operands_take_hoppers_pipeline_and_others_the_portable_ones(
    sizes: tuple[int, int, int], hopper: DeviceInfo
) -> None:
    _, n, k = sizes
    assert (best(problem_of(*sizes), hopper).pipeline == "ws") == (k % 8 == 0)
    assert best(problem_of(*sizes, "bf16", "rcr", alignment=8), hopper).pipeline != "ws"
    config = best(problem_of(*sizes), hopper)
    if config.pipeline == "ws" and n % 8:
        assert config.epilogue is Epilogue.DEFAULT


def test_big_products_take_big_tiles_in_clusters(hopper: DeviceInfo) -> None:
    for sizes in ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096)):
        config = best(problem_of(*sizes), hopper)
        assert config.tile[0] * config.tile[1] >= 128 * 192 and config.cluster != (1, 1, 1) and config.split_k == 1


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 24, 33, 40, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int8"])
def test_few_rows_waste_no_rows_and_keep_all_units_reading(m: int, dtype: str, hopper: DeviceInfo) -> None:
    for n, k in ((4096, 4096), (8192, 8192), (1024, 8192)):
        problem = problem_of(m, n, k, dtype)
        config = best(problem, hopper)
        assert config.transpose_c and m <= config.tile[0] < m + 16 and config.tile[0] % 8 == 0
        grid = GEMM.plan(problem, config, hopper).stages[0].geometry.grid[0]
        assert grid >= 64, (config.name, grid)


def test_k_is_shared_where_tiles_do_not_fill_the_device(hopper: DeviceInfo) -> None:
    config = best(problem_of(256, 256, 16384), hopper)
    plan = GEMM.plan(problem_of(256, 256, 16384), config, hopper)
    assert config.split_k > 1 and 100 <= plan.stages[0].geometry.grid[0] <= 132
    # Within a cluster sums go from workgroup to workgroup, else through the workspace.
    assert len(plan.stages) == 1 and (plan.counter_bytes > 0) == (config.cluster[2] == 1)


def test_a_last_round_that_is_nearly_empty_is_shared_by_stream_k(hopper: DeviceInfo) -> None:
    found = GEMM.candidates(problem_of(2304, 4096, 8192), hopper)
    stream = [config for config in found if config.reduction is Reduction.LINEAR]
    assert stream and all(config.persistent and config.split_k == 1 for config in stream)
    assert not any(c.reduction is Reduction.LINEAR for c in GEMM.candidates(problem_of(16, 4096, 4096), hopper))


@pytest.mark.parametrize("split", [1, 2, 5])
def test_slices_that_the_caller_asks_for_are_what_it_gets(split: int, hopper: DeviceInfo) -> None:
    problem = problem_of(256, 256, 16384, split_k=split)
    assert {config.split_k for config in GEMM.candidates(problem, hopper)} == {split}
    assert reasons(problem, WS, hopper) == set()
    wrong = with_signature(problem, WS).replace(split_k=3)
    assert {item.rule for item in GEMM.mismatches(problem, wrong, hopper)} == {"variant"}
    streaming = with_signature(problem, WS).replace(split_k=1, reduction=Reduction.LINEAR)
    assert {item.rule for item in GEMM.mismatches(problem, streaming, hopper)} == {"variant"}


def test_eight_bit_floats_are_promoted_unless_the_caller_is_content(hopper: DeviceInfo) -> None:
    careful, fast = problem_of(4096, 4096, 4096, "fp8"), problem_of(4096, 4096, 4096, "fp8", fast_accumulation=True)
    assert all(config.promote > 0 for config in GEMM.candidates(careful, hopper) if config.pipeline == "ws")
    chosen = best(fast, hopper)
    assert chosen.pipeline == "ws" and chosen.promote == 0
    assert {item.rule for item in GEMM.mismatches(careful, chosen, hopper)} == {"accumulation"}
    assert not GEMM.mismatches(fast, best(careful, hopper), hopper)


def test_misaligned_operands_are_named(hopper: DeviceInfo) -> None:
    assert reasons(problem_of(128, 256, 64), WS, hopper) == set()
    assert reasons(problem_of(128, 256, 64, alignment=8), WS, hopper) == {"alignment"}
    assert reasons(problem_of(128, 256, 65), WS, hopper) == {"copy_strides"}
    assert reasons(problem_of(128, 257, 64), WS, hopper) == {"copy_strides"}
    assert reasons(problem_of(128, 257, 64), WS.replace(epilogue=Epilogue.DEFAULT), hopper) == set()
    assert reasons(problem_of(128, 256, 0), WS, hopper) == {"empty_k"}
    for problem in (problem_of(128, 257, 65, alignment=2), problem_of(128, 256, 0)):
        assert reasons(problem, PORTABLE, hopper) == set()


def test_batches_that_lie_oddly_are_for_the_portable_kernels(hopper: DeviceInfo) -> None:
    inputs = {"a": of("bf16", (3, 64, 64), (64 * 64 + 4, 64, 1)), "b": of("bf16", (3, 64, 256), (64 * 256, 1, 64))}
    problem = GEMM.parse(OperationRequest("gemm", inputs))
    assert reasons(problem, WS, hopper) == {"copy_strides"}
    assert best(problem, hopper).pipeline != "ws"


def test_nothing_can_read_what_is_not_aligned_to_its_own_elements(hopper: DeviceInfo) -> None:
    problem = problem_of(64, 64, 64, alignment=1)
    assert reasons(problem, PORTABLE, hopper) == {"alignment"}
    with pytest.raises(UnsupportedError) as caught:
        best(problem, hopper)
    assert caught.value.rule == "alignment"
    assert best(problem_of(64, 64, 64, "int8", alignment=4), hopper).pipeline != "ws"


def test_a_packed_b_is_refused_with_the_reason(hopper: DeviceInfo) -> None:
    packing = PackedFormat("bf16", 32, 2)
    b = TensorDesc(DType.BF16, (96, 64), (), packing=str(packing), packed_bytes=packing.nbytes(96, 64))
    problem = GEMM.parse(OperationRequest("gemm", {"a": of("bf16", (32, 96)), "b": b}))
    assert GEMM.candidates(problem, hopper) == ()
    with pytest.raises(UnsupportedError) as caught:
        best(problem, hopper)
    assert caught.value.rule == "packing" and "plain B" in str(caught.value)


def test_packing_is_refused_with_the_reason(hopper: DeviceInfo) -> None:
    pack_b = PackBOperation()
    problem = pack_b.parse(OperationRequest("gemm_pack_b", {"b": of("bf16", (96, 64))}))
    with pytest.raises(UnsupportedError) as caught:
        Selector().select(pack_b, problem, hopper)
    assert caught.value.rule == "packing" and "plain B" in str(caught.value)
    assert pack_b.refusal(problem, device_of(tilewright_arch.load("x86-64-v3"))) is None


def test_groups_share_one_launch(hopper: DeviceInfo) -> None:
    inputs = {}
    for group, rows in enumerate((7, 300, 0, 64)):
        inputs |= {f"a[{group}]": of("bf16", (rows, 512)), f"b[{group}]": of("bf16", (512, 1024), (1, 512))}
    problem = GEMM.parse(OperationRequest("gemm", inputs))
    config = best(problem, hopper)
    assert config.grouped and config.pipeline == "ws" and config.split_k == 1
    assert len(GEMM.plan(problem, config, hopper).stages) == 1


@pytest.mark.parametrize(
    ("attributes", "rule"),
    [
        ({"alignment": 3}, "attribute_range"),
        ({"alignment": 0}, "attribute_range"),
        ({"alignment": 256}, "attribute_range"),
        ({"alignment": True}, "attribute_type"),
        ({"fast_accumulation": 1}, "attribute_type"),
    ],
)
def test_what_the_caller_promises_is_checked(attributes: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        problem_of(8, 8, 8, **attributes)
    assert caught.value.rule == rule and caught.value.fix


def test_only_unusual_promises_describe_a_problem() -> None:
    usual, other = problem_of(8, 8, 8), problem_of(8, 8, 8, alignment=2, fast_accumulation=True)
    assert not {"alignment", "fast_accumulation"} & set(usual.describe())
    assert other.describe()["alignment"] == 2 and other.describe()["fast_accumulation"] is True
    assert usual != other and problem_of(8, 8, 8, alignment=16) == problem_of(8, 8, 8, alignment=128) == usual


def test_every_kernel_is_explained(hopper: DeviceInfo) -> None:
    told = explain(GEMM, problem_of(333, 777, 1111), hopper, Heuristic(), limit=5)
    assert told.chosen is not None and told.refused_total > 100
    assert all(refusal.violations for refusal in told.refused)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("config", [WS, PORTABLE], ids=["ws", "portable"])
def test_more_work_never_takes_less_time(axis: int, config: GemmConfig, hopper: DeviceInfo) -> None:
    seconds = []
    for factor in (1, 2, 3, 4, 8, 16):
        sizes = [2048, 2048, 512]  # enough for all units: a few more workgroups read memory faster
        sizes[axis] *= factor
        seconds.append(GEMM.predict(problem_of(*sizes), config, hopper).seconds)
    assert seconds == sorted(seconds) and seconds[-1] > seconds[0]


def test_thousands_of_groups_are_predicted_from_a_sample(hopper: DeviceInfo) -> None:
    inputs = {}
    for group in range(512):
        inputs |= {f"a[{group}]": of("bf16", (group + 1, 64)), f"b[{group}]": of("bf16", (64, 256), (1, 64))}
    problem = GEMM.parse(OperationRequest("gemm", inputs))
    config = best(problem, hopper)
    whole = sum(-(-(group + 1) // config.tile[0]) for group in range(512)) * -(-256 // config.tile[1])
    calls = calls_of(lambda: GEMM.predict(problem, config, hopper))
    assert 0 < calls < CALLS / 10, "each of 512 groups was looked at"
    assert GEMM.plan(problem, config, hopper).stages[0].geometry.grid[0] <= max(whole, 132)

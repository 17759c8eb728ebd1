"""Rules of CUDA devices: each says what is wrong, and what it asks for mends it."""

from __future__ import annotations

from typing import Any

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.vocabulary import Epilogue, Reduction
from tilewright_kit.tiles.footprint.workgroup import (
    accumulator_limit,
    accumulators_per_thread,
    consumers,
    shared_bytes,
    stages_of,
    threads_of,
)
from tilewright_kit.types.dtypes import DType

WS = GemmConfig(
    dtype_a=DType.BF16,
    pipeline="ws",
    scheduler="cooperative",
    persistent=True,
    tile=(128, 256, 64),
    wave=(2, 1, 1),
    warp_tile=(64, 256, 16),
)
PINGPONG = WS.replace(
    scheduler="pingpong", num_wave_groups=2, tile=(64, 128, 64), wave=(1, 1, 1), warp_tile=(64, 128, 16)
)
SWAPPED = WS.replace(tile=(16, 128, 64), wave=(1, 2, 1), warp_tile=(16, 64, 16), transpose_c=True)
FP8 = WS.replace(dtype_a=DType.FP8, tile=(128, 128, 128), warp_tile=(64, 128, 32), promote=4)
PORTABLE = GemmConfig(dtype_a=DType.BF16, tile=(128, 128, 32), wave=(2, 2, 1), warp_tile=(16, 8, 16), stages=4)
INT8 = PORTABLE.replace(dtype_a=DType.INT8, tile=(128, 128, 64), warp_tile=(16, 8, 32))


@pytest.fixture(scope="module")
def hopper() -> ArchSpec:
    return tilewright_arch.load("sm_90a")


@pytest.mark.parametrize("config", [WS, PINGPONG, SWAPPED, FP8, PORTABLE, INT8], ids=lambda config: config.name)
def test_what_the_cases_begin_with_is_valid(config: GemmConfig, hopper: ArchSpec) -> None:
    assert RULES.check(config, hopper) == ()


CASES: list[tuple[str, GemmConfig, dict[str, Any]]] = [
    ("cluster", WS, {"cluster": (3, 1, 1)}),
    ("slices_in_cluster", WS, {"cluster": (1, 1, 2), "persistent": False}),
    ("slices_in_cluster", WS, {"cluster": (1, 1, 2), "split_k": 2}),
    ("slices_in_cluster", PINGPONG, {"cluster": (1, 1, 2), "split_k": 2}),
    ("slices_in_cluster", WS, {"cluster": (1, 1, 2), "grouped": True, "persistent": False}),
    ("cluster", PORTABLE, {"cluster": (2, 1, 1)}),
    ("stage_count", WS, {"stages": 1}),
    ("stage_count", WS, {"stages": 25}),
    ("stage_count", PORTABLE, {"pipeline": "compv3", "stages": 2}),
    ("promotion", WS, {"promote": 4}),
    ("promotion", FP8, {"promote": 3}),
    ("promotion", FP8, {"promote": -4}),
    ("promotion", PORTABLE, {"dtype_a": DType.FP8, "warp_tile": (16, 8, 32), "promote": 4}),
    ("swapped_warp_tile", WS, {"transpose_c": True}),
    ("swapped_warp_tile", SWAPPED, {"transpose_c": False}),
    ("wave_groups", PINGPONG, {"num_wave_groups": 1}),
    ("wave_groups", WS, {"num_wave_groups": 2}),
    ("register_split", WS, {"wave": (4, 2, 1)}),
    ("register_split", SWAPPED, {"wave": (2, 1, 1)}),
    ("register_split", PINGPONG, {"wave": (2, 1, 1)}),
    ("accumulators_fit_registers", WS, {"tile": (256, 256, 64)}),
    ("accumulators_fit_registers", FP8, {"tile": (256, 128, 128)}),
    ("accumulators_fit_registers", PORTABLE, {"tile": (256, 256, 32)}),
    ("one_instruction_wide", WS, {"tile": (128, 512, 64)}),
    ("one_instruction_wide", SWAPPED, {"tile": (32, 128, 64)}),
    ("swizzled_rows", WS, {"tile": (128, 256, 32)}),
    ("swizzled_rows", FP8, {"tile": (128, 128, 64)}),
    ("swizzled_rows", PINGPONG, {"tile": (64, 128, 512)}),
    ("mn_major", FP8, {"layout": "rrr"}),
    ("mn_major", FP8, {"layout": "ccr"}),
    ("mn_major", WS, {"layout": "rrr", "tile": (128, 96, 64), "warp_tile": (64, 96, 16), "epilogue": Epilogue.DEFAULT}),
    ("mn_major", WS, {"layout": "rrr", "tile": (128, 192, 64), "warp_tile": (64, 192, 16), "cluster": (2, 1, 1)}),
    ("mn_major", SWAPPED, {"layout": "ccr"}),
    ("copy_box", WS, {"tile": (384, 64, 64), "warp_tile": (64, 64, 16)}),
    ("copy_box", SWAPPED, {"tile": (24, 128, 64), "warp_tile": (24, 64, 16), "cluster": (1, 2, 1)}),
    ("stored_lines", WS, {"tile": (128, 96, 64), "warp_tile": (64, 96, 16)}),
    ("stored_lines", WS, {"tile": (128, 48, 64), "warp_tile": (64, 48, 16), "dtype_c": "fp32"}),
    ("always_padded", WS, {"pad_m": False, "pad_k": False}),
    ("always_persistent", PINGPONG, {"persistent": False}),
    ("always_persistent", WS, {"persistent": False, "reduction": Reduction.LINEAR}),
    ("shared_memory", WS, {"stages": 5}),
    ("shared_memory", WS, {"tile": (128, 256, 256)}),
    ("shared_memory", PORTABLE, {"tile": (128, 128, 256), "stages": 6}),
    ("paired_columns", INT8, {"layout": "rrr", "tile": (64, 16, 64)}),
    ("transposed_fragments", PORTABLE, {"transpose_c": True}),
    ("stream_k", WS, {"reduction": Reduction.ATOMIC}),
    ("stream_k", WS, {"reduction": Reduction.LINEAR, "batched": True}),
    ("stream_k", PORTABLE, {"reduction": Reduction.LINEAR, "persistent": True}),
    ("stream_k", PINGPONG, {"reduction": Reduction.LINEAR}),
    ("one_work_distribution", WS, {"reduction": Reduction.LINEAR, "split_k": 2}),
    ("trait", WS, {"scheduler": "intrawave"}),
    ("pipeline", PORTABLE, {"pipeline": "mem"}),
    ("pipeline", WS, {"preshuffle": True}),
    ("structured_sparsity", WS, {"structured_sparsity": True}),
    ("warp_tile_table", WS, {"dtype_a": DType.INT8, "tile": (128, 40, 128), "warp_tile": (64, 40, 32)}),
]


@pytest.mark.parametrize(("rule", "base", "changes"), CASES)
def test_each_rule_speaks_when_it_is_broken_and_what_it_asks_for_mends_it(
    rule: str, base: GemmConfig, changes: dict[str, Any], hopper: ArchSpec
) -> None:
    broken = base.replace(**changes)
    found = {violation.rule: violation for violation in RULES.check(broken, hopper)}
    assert rule in found and found[rule].reason
    mended = broken.replace(**found[rule].fix)
    assert mended != broken
    left = {(item.rule, item.field) for item in RULES.check(mended, hopper)}
    assert (rule, found[rule].field) not in left
    assert RULES.correct(broken, hopper).is_valid


def test_persistent_workgroups_may_claim_slices_on_cuda(hopper: ArchSpec) -> None:
    assert RULES.allows(WS.replace(split_k=4), hopper)
    assert RULES.allows(WS.replace(reduction=Reduction.LINEAR), hopper)
    assert RULES.allows(WS.replace(reduction=Reduction.LINEAR, epilogue=Epilogue.DEFAULT), hopper)


def test_threads_and_consumers_count_wave_groups_and_the_producer(hopper: ArchSpec) -> None:
    assert [(consumers(item), threads_of(item, hopper)) for item in (WS, PINGPONG, SWAPPED, PORTABLE)] == [
        (2, 384),
        (2, 384),
        (2, 384),
        (4, 128),
    ]


def test_accumulators_of_promoted_sums_count_twice(hopper: ArchSpec) -> None:
    assert accumulators_per_thread(WS, hopper) == 128 and accumulator_limit(WS, hopper) == 192
    assert accumulators_per_thread(FP8, hopper) == 2 * accumulators_per_thread(FP8.replace(promote=0), hopper) == 128


@pytest.mark.parametrize(
    ("config", "stages", "nbytes"),
    [
        # 49152 bytes a stage; two pieces of 8 KiB of C for each of two consumers; 512 for barriers.
        (WS, 4, 4 * 49152 + 2 * 2 * 8192 + 512),
        (WS.replace(epilogue=Epilogue.DEFAULT), 4, 4 * 49152 + 512),
        (PINGPONG, 8, 8 * 24576 + 2 * 2 * 8192 + 512),
        # One piece each: 64 columns of 16 rows.
        (SWAPPED, 12, 12 * 18432 + 2 * 16 * 64 * 2 + 512),
        # The sums of one more workgroup.
        (
            SWAPPED.replace(split_k=2, cluster=(1, 1, 2), persistent=False),
            11,
            11 * 18432 + 2 * 16 * 64 * 2 + 16 * 128 * 4 + 512,
        ),
        (PORTABLE, 4, 16384 + 3 * (16384 + 256 * 16) + 16),
        (PORTABLE.replace(pipeline="compv3", stages=0), 1, 4 * 16 * 72 * 4 + 16),
    ],
    ids=lambda value: value.name if isinstance(value, GemmConfig) else "",
)
def test_shared_memory_is_stages_staging_and_barriers(
    config: GemmConfig, stages: int, nbytes: int, hopper: ArchSpec
) -> None:
    assert (stages_of(config, hopper), shared_bytes(config, hopper)) == (stages, nbytes)
    assert nbytes <= hopper.lds_bytes


def test_stages_fill_what_the_device_really_has(hopper: ArchSpec) -> None:
    small = hopper.with_device(lds_bytes=101376)
    narrow = WS.replace(tile=(128, 128, 64), warp_tile=(64, 128, 16))
    assert stages_of(narrow, hopper) == 6 and stages_of(narrow, small) == 2
    assert "shared_memory" in {violation.rule for violation in RULES.check(WS, small)}

"""Rules of convolution kernels: each says what it should, and whatever is wrong can be mended or is refused with a
reason.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from conv_rule_cases import ALL_CASES, CPU, CPU_CASES, Case, judge

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import CONFIGS, DIRECT_PIPELINE, ConvConfig
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import LAYOUTS, Direction, Scale, Specialization
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Binary, Epilogue, Reduction, Switch, Unary


@pytest.mark.parametrize("case", CPU_CASES, ids=str)
def test_each_rule_of_cpus_speaks_when_it_is_broken_and_mends(case: Case) -> None:
    judge(case)


def test_no_rule_is_without_a_case() -> None:
    assert {case.rule for case in ALL_CASES} == {rule.__name__ for rule in RULES.rules}


def test_rules_and_fixes_are_deterministic(arch: ArchSpec) -> None:
    broken = CPU.replace(tile=(100, 100, 100), wave=(3, 3, 3), pipeline="compv9", layout="xyz")
    assert RULES.check(broken, arch) == RULES.check(broken, arch)
    assert RULES.correct(broken, arch) == RULES.correct(broken, arch)


def test_what_means_nothing_to_a_cpu_has_one_value_only() -> None:
    arch = tilewright_arch.load("x86-64-v4")
    meaningless: dict[str, Any] = {"vector_sizes": (2, 2, 2), "split_image": True, "pad_n": False, "two_stage": True}
    assert RULES.correct(CPU.replace(**meaningless), arch).config == CPU


def test_every_seed_pipeline_that_has_no_template_is_refused_by_name(arch: ArchSpec) -> None:
    for name in ("basic_v1", "basic_async_v1", "compv5", "compv6", "comp_async", "wavelet"):
        broken = {item.rule for item in RULES.check(ConvConfig(pipeline=name), arch)}
        assert broken & {"pipeline", "pipeline_template"}


# ---- the stress test ----

SIZES = [0, 1, 4, 6, 8, 14, 16, 24, 32, 48, 64, 96, 128, 168, 192, 256, 512, 2048, 65535, 100000]
DTYPES = [*map(str, DType), "nonsense"]
BEYOND_MENDING = {"dtype_pair", "dtype_direction"}
"""What a chip cannot multiply, and what has no gradient."""
DRAWN = {60: 15, 1000: 300}
"""Configurations that are drawn, and how many of them are corrected at the least."""


def random_configuration(seed: int, arch: ArchSpec) -> ConvConfig:
    """Anything that a user may write, with a bias towards words that the arch knows."""
    rng = random.Random(seed)
    pick = rng.choice
    keys = [tile for tiles in arch.warp_tiles.values() for tile in tiles]

    def triple(sizes: list[int]) -> tuple[int, int, int]:
        return pick(sizes), pick(sizes), pick(sizes)

    def rarely(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.25 else default

    return CONFIGS[pick(list(Direction))](
        dtype_in=pick(list(DType)),
        layout=pick([*LAYOUTS, "", "nhwc", "rcr"]),
        ndim=pick([-1, 0, 1, 2, 2, 3, 4, 100]),
        pipeline=pick([*arch.pipelines, "compv4", "compv5", "compv6", DIRECT_PIPELINE, "nonsense"]),
        epilogue=pick(list(Epilogue)),
        scheduler=pick(["intrawave", "interwave", "default", "pingpong"]),
        tile=triple(SIZES),
        wave=pick([pick(arch.waves), triple([1, 2, 3, 4, 8]), triple(SIZES), triple([-3, 0, 5])]),
        warp_tile=pick([pick(keys), triple(SIZES)]),
        dtype_wei=pick(["", "", "", "fp8", "bf8", *DTYPES]),
        dtype_out=rarely(pick(DTYPES), ""),
        vector_sizes=pick([(8, 8, 8), (1, 1, 1), triple([1, 2, 4, 8, 16]), triple([-1, 0, 3, 7, 100])]),
        num_wave_groups=pick([-1, 0, 1, 2, 3]),
        num_groups_to_merge=pick([-1, 0, 1, 1, 2, 3, 8, 64]),
        double_smem_buffer=pick(list(Switch)),
        two_stage=rarely(True, False),
        specialization=pick([Specialization.DEFAULT, *Specialization]),
        explicit_gemm=rarely(True, False),
        streamk=rarely(pick(list(Reduction)), Reduction.NONE),
        streamk_persistent=rarely(True, False),
        split_image=rarely(True, False),
        pad_m=pick([True, False]),
        pad_k=pick([True, False]),
        split_k=pick([-1, 0, 1, 1, 2, 300]),
        block_per_cu=pick([-1, 0, 0, 1, 2, 100]),
        stages=pick([-1, 0, 0, 2, 4, 100]),
        bias=rarely(pick(DTYPES), ""),
        unary=pick(list(Unary)),
        binary=pick(list(Binary)),
        num_d_tensors=pick([-1, 0, 0, 1, 2, 3, 400]),
        dtype_d=tuple(pick(DTYPES) for _ in range(pick([0, 0, 1, 2]))),
        scale=pick(list(Scale)),
        accumulate=pick([True, False]),
        channel_tile=rarely(pick([-1, 1, 3, 8, 64, 4096]), 0),
        pixel_tile=rarely(triple([0, 1, 2, 4, 30]), (0, 0, 0)),
        filter=rarely(triple([0, 1, 3, 5, 30]), (0, 0, 0)),
        stride=rarely(triple([-1, 0, 1, 2, 30]), (0, 0, 0)),
        dilation=rarely(triple([0, 1, 2, 30]), (0, 0, 0)),
        mapped_rows=pick([True, False]),
    )


def mended(seed: int, arch: ArchSpec) -> bool:
    """Whether the configuration of a seed was mended; if not, it must be beyond mending."""
    correction = RULES.correct(random_configuration(seed, arch), arch)
    assert correction.config.name
    assert all(violation.reason and violation.rule for violation in correction.remaining)
    broken = {violation.rule for violation in correction.remaining}
    assert not broken or broken & BEYOND_MENDING, correction
    return correction.is_valid


@pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.exhaustive])], ids="{}-drawn".format
)
@pytest.mark.some(3)
def test_random_configurations_are_mended_or_refused_with_a_reason(count: int, arch: ArchSpec) -> None:
    first = zlib.crc32(arch.name.encode())  # others for every arch
    assert sum(mended(first + index, arch) for index in range(count)) >= DRAWN[count]

"""Every rule refuses what it is about, with a reason and a fix that mends it, and lets the rest pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fmha_configs import AMD, ARCHS, CPU, NEW_AMD, NVIDIA, RDNA, all_templates, valid

from tilewright_arch import ArchSpec, FrozenMap
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.vocabulary import (
    BiasKind,
    Family,
    FmhaDType,
    KvLayout,
    MaskKind,
    Mode,
    QScale,
    Rope,
    Scheduling,
    SmallType,
    VLayout,
)
from tilewright_kit.config.rules import Violation

F, D = Family, FmhaDType
Case = tuple[str, ArchSpec, dict[str, Any], dict[str, Any]]

CASES: list[Case] = [
    # rule, arch, what the valid kernel is, and what breaks it
    ("family_known", CPU, {}, {"family": F.APPENDKV}),
    ("dtype_arch", RDNA, {}, {"dtype": D.FP8FP16}),
    ("backward_dtype", CPU, {"family": F.DQ_DK_DV}, {"dtype": D.FP8BF16}),
    ("forward_dtype", CPU, {}, {"dtype": D.MXFP8}),
    ("pipeline_arch", CPU, {}, {"pipeline": "qr_async"}),
    ("pipeline_arch", AMD, {}, {"pipeline": "bwd"}),
    ("pipeline_arch", AMD, {"family": F.DQ_DK_DV}, {"pipeline": "qr"}),
    ("trload_support", AMD, {}, {"use_trload": True}),
    ("trload_support", NEW_AMD, {}, {"use_trload": True}),
    ("hdim_multiple_of_8", CPU, {}, {"hdim": (60, 64)}),
    ("hdim_multiple_of_8", AMD, {}, {"hdim": (512, 64)}),
    ("hdim_multiple_of_8", CPU, {}, {"hdim": (1088, 64)}),
    ("hdim_arch", CPU, {"hdim": (320, 64)}, {"hdim": (264, 64)}),
    ("hdim_arch", AMD, {}, {"hdim": (40, 72)}),
    ("trload_symmetric", NEW_AMD, {"pipeline": "qr_async_trload"}, {"hdim": (128, 64)}),
    ("tile_lengths", CPU, {}, {"tile": (64, 128)}),
    ("tile_lengths", AMD, {"family": F.DQ_DK_DV}, {"tile": (64, 64, 32, 64, 32, 64)}),
    ("tile_lengths", AMD, {}, {"wave": (4, 1, 1)}),
    ("tile_lengths", AMD, {}, {"warp_tile": (0,) * 9}),
    ("qr_256_mfma", AMD, {"hdim": (256, 256), "pipeline": "qr"}, {"tile": (64, 32, 32, 256, 32, 256)}),
    ("block_per_cu", AMD, {}, {"block_per_cu": 0}),
    ("block_per_cu", CPU, {}, {"block_per_cu": 2}),
    ("wave_groups", AMD, {}, {"num_wave_groups": 2}),
    ("batch_prefill_form", AMD, {"family": F.BATCH_PREFILL}, {"v_layout": VLayout.VC}),
    ("batch_prefill_form", AMD, {"family": F.BATCH_PREFILL}, {"paged": False}),
    ("batch_prefill_form", AMD, {"family": F.BATCH_PREFILL}, {"mode": Mode.BATCH}),
    ("batch_prefill_form", AMD, {"family": F.BATCH_PREFILL}, {"page_size": 24}),
    ("batch_prefill_form", AMD, {"family": F.BATCH_PREFILL}, {"pipeline": "qs"}),
    ("append_form", AMD, {"family": F.APPENDKV}, {"pipeline": "qr"}),
    ("append_form", AMD, {"family": F.APPENDKV, "paged": True}, {"page_size": 2048}),
    ("combine_form", AMD, {"family": F.COMBINE}, {"pipeline": "qr"}),
    ("combine_form", AMD, {"family": F.COMBINE}, {"tile": (32, 64, 32, 24, 32, 64)}),
    ("combine_form", AMD, {"family": F.COMBINE, "dtype": D.FP32}, {"hdim": (48, 48)}),
    ("pagedkv_form", AMD, {"family": F.PAGEDKV}, {"pipeline": "qr"}),
    ("pagedkv_form", AMD, {"family": F.PAGEDKV}, {"paged": False}),
    ("pagedkv_form", AMD, {"family": F.PAGEDKV}, {"mode": Mode.GROUP}),
    ("splitkv_form", AMD, {"family": F.SPLITKV}, {"pipeline": "qs"}),
    ("splitkv_form", AMD, {"family": F.SPLITKV}, {"v_layout": VLayout.VC}),
    ("group_padding", AMD, {"mode": Mode.GROUP}, {"pad_sk": False}),
    ("group_padding", AMD, {"mode": Mode.GROUP}, {"pad_s": False}),
    ("randval_dropout", CPU, {}, {"randval": True}),
    ("dbias_bias", CPU, {"family": F.DQ_DK_DV}, {"dbias": True}),
    ("bias_type", CPU, {"bias": BiasKind.ELEMENTWISE}, {"dtype_bias": SmallType.FP16}),
    ("bias_type", CPU, {"bias": BiasKind.ELEMENTWISE}, {"dtype_bias": SmallType.BF16}),
    ("bias_type", CPU, {"family": F.APPENDKV, "rope": Rope.HALF}, {"dtype": D.FP8FP16}),
    ("sink_mask", CPU, {"mask": MaskKind.CAUSAL}, {"sink": True}),
    ("paged_family", CPU, {}, {"paged": True}),
    ("vectorized_page", AMD, {"family": F.PAGEDKV, "kv_layout": KvLayout.VECTORIZED}, {"page_size": 4}),
    ("qscale_dtype", CPU, {}, {"qscale": QScale.PERTENSOR}),
    ("kv_blockscale_paged", CPU, {"dtype": D.FP8BF16}, {"qscale": QScale.KV_BLOCKSCALE}),
    ("rope_family", CPU, {}, {"rope": Rope.HALF}),
    ("backward_features", CPU, {"family": F.DQ_DK_DV}, {"paged": True}),
    ("backward_features", CPU, {"family": F.DQ_DK_DV}, {"qscale": QScale.PERTENSOR}),
    ("family_fields", CPU, {"family": F.APPENDKV}, {"mask": MaskKind.CAUSAL}),
    ("family_fields", CPU, {}, {"num_splits": 4}),
    ("family_fields", CPU, {}, {"max_splits_log2": 3}),
    ("family_fields", CPU, {"family": F.SPLITKV}, {"num_splits": 100}),
    ("family_fields", CPU, {"family": F.SPLITKV}, {"max_splits_log2": 40}),
    ("family_fields", CPU, {"family": F.COMBINE}, {"selection_rank": 2}),
    ("family_fields", CPU, {}, {"kv_layout": KvLayout.VECTORIZED}),
    ("family_fields", CPU, {}, {"dtype_bias": SmallType.FP32}),
    ("family_fields", CPU, {}, {"scheduler": Scheduling.PINGPONG}),
    ("family_fields", CPU, {}, {"pad_dv": False}),
    ("family_fields", CPU, {}, {"hdim_align": (16, 16)}),
    ("family_fields", CPU, {"family": F.APPENDKV}, {"stages": 2}),
    ("page_tile", AMD, {"family": F.PAGEDKV}, {"tile": (64, 96, 32, 64, 32, 64), "page_size": 64}),
    ("page_tile", CPU, {"family": F.PAGEDKV}, {"page_size": 16}),
    ("advice_fields", CPU, {}, {"max_seq_len_q": -1}),
    ("elementwise_form", AMD, {"family": F.APPENDKV}, {"wave": (4, 1, 1, 4, 1, 1, 1, 1, 1)}),
    ("elementwise_form", AMD, {"family": F.COMBINE}, {"tile": (64, 64, 32, 32, 32, 64)}),
    ("cpu_defaults", CPU, {}, {"tile": (13, 100, 8, 8, 8, 8)}),
    ("cpu_defaults", CPU, {}, {"wave": (7, 2, 1, 1, 1, 1, 1, 1, 1)}),
    ("cpu_defaults", CPU, {}, {"warp_tile": (3, 5, 7) * 3}),
    ("softmax_rows", AMD, {}, {"wave": (2, 2, 1, 2, 2, 1, 1, 1, 1)}),
    ("softmax_rows", AMD, {"family": F.SPLITKV, "pipeline": "qr_nwarp_sshuffle"}, {"tile": (64, 64, 32, 64, 32, 64)}),
    (
        "softmax_rows", NVIDIA, {"family": F.SPLITKV, "pipeline": "qr_nwarp_sshuffle"},
        {"tile": (16, 512, 64, 64, 512, 64)},
    ),
    ("wave_table", AMD, {"family": F.DQ_DK_DV}, {"wave": (1, 3, 1, 3, 1, 1, 1, 3, 1)}),
    ("wave_table", AMD, {"family": F.DQ_DK_DV}, {"wave": (1, 4, 1, 2, 1, 1, 1, 4, 1)}),
    ("warp_tile_table", AMD, {}, {"warp_tile": (64, 4, 16) * 3}),
    ("warp_divides_tile", AMD, {"pipeline": "qr"}, {"tile": (96, 64, 32, 64, 32, 64)}),
    ("hdim_tile_table", AMD, {}, {"tile": (100, 50, 30, 64, 32, 64)}),
    ("hdim_tile_table", AMD, {}, {"tile": (64, 64, 32, 32, 32, 64)}),
    ("hdim_tile_table", AMD, {"family": F.DQ_DK_DV}, {"tile": (32, 64, 32, 32, 32, 32, 32, 32, 32)}),
    ("k0_divides_hdim", AMD, {}, {"tile": (64, 64, 96, 64, 32, 64)}),
    ("k0max_table", AMD, {}, {"tile": (64, 64, 32, 64, 32, 128)}),
    ("k1_divides_tile", NVIDIA, {}, {"tile": (64, 64, 64, 64, 48, 64)}),
    ("k1_value", AMD, {}, {"tile": (64, 64, 32, 64, 16, 64)}),
    ("workgroup_threads", AMD, {"family": F.DQ_DK_DV}, {"wave": (1, 32, 1, 32, 1, 1, 1, 32, 1)}),
    ("lds_budget", AMD, {"pipeline": "qr", "hdim": (128, 128)}, {"tile": (128, 384, 32, 128, 32, 128)}),
    ("lds_budget_async", AMD, {"hdim": (128, 128)}, {"tile": (128, 128, 32, 128, 32, 128)}),
    (
        "accumulators_fit_registers", RDNA, {"family": F.DQ_DK_DV, "hdim": (128, 128), "dtype": D.FP16},
        {"wave": (1, 2, 1, 2, 1, 1, 1, 2, 1)},
    ),
    (
        "accumulators_fit_registers", NVIDIA, {"hdim": (128, 128)},
        {"tile": (128, 64, 128, 128, 32, 128), "wave": (1, 1, 1, 1, 1, 1, 1, 1, 1)},
    ),
    ("cuda_padding", NVIDIA, {}, {"pad_d": False}),
    ("ws_form", NVIDIA, {"pipeline": "ws"}, {"hdim": (96, 96)}),
    ("ws_form", NVIDIA, {"pipeline": "ws"}, {"tile": (100, 128, 64, 64, 128, 64)}),
    ("ws_form", NVIDIA, {"pipeline": "ws"}, {"stages": 9}),
    ("ws_form", NVIDIA, {}, {"stages": 3}),
    (
        "async_vectors", AMD, {"pipeline": "qr_async"},
        {"tile": (64, 16, 16, 64, 16, 64), "wave": (4, 1, 1, 4, 1, 1, 1, 1, 1)},
    ),
    ("tile_128_form", AMD, {"hdim": (128, 128), "pipeline": "qr"}, {"tile": (64, 64, 64, 128, 32, 128)}),
    ("bm0_list", AMD, {"pipeline": "qr"}, {"tile": (32, 64, 32, 64, 32, 64)}),
    (
        "gfx950_trload_v3", NEW_AMD, {"pipeline": "qr_async_trload", "hdim": (128, 128)},
        {"tile": (128, 128, 32, 128, 32, 128)},
    ),
    ("gfx950_trload_v3", NEW_AMD, {"hdim": (128, 128)}, {"pipeline": "v3"}),
    ("direct_form", NEW_AMD, {"hdim": (64, 64), "pipeline": "v3"}, {"tile": (256, 64, 32, 64, 32, 64)}),
    ("direct_form", AMD, {"family": F.DQ_DK_DV, "hdim": (128, 128), "pipeline": "v3"}, {"hdim": (64, 64)}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _templates() -> Iterator[None]:
    with all_templates():
        yield


def _id(case: Case) -> str:
    return f"{case[0]}-{case[1].name}-{'-'.join(case[3])}"


def _kernel(case: Case) -> FmhaConfig:
    fields = dict(case[2])
    return valid(case[1], fields.pop("family", F.FWD), **fields)


def _of(rule: str, config: FmhaConfig, arch: ArchSpec) -> list[Violation]:
    return [violation for violation in RULES.check(config, arch) if violation.rule == rule]


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_a_rule_refuses_and_its_fix_mends(case: Case) -> None:
    rule, arch, _, changes = case
    good = _kernel(case)
    assert _of(rule, good, arch) == []
    broken = good.replace(**changes)
    violations = _of(rule, broken, arch)
    assert violations, [str(item) for item in RULES.check(broken, arch)]
    for violation in violations:
        assert violation.reason and violation.field in good.field_names()
        assert violation.fix, violation
        mended = broken.replace(**violation.fix)
        assert not [item for item in _of(rule, mended, arch) if item.field == violation.field]


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_correction_ends_in_a_valid_kernel(case: Case) -> None:
    """Whatever is broken, fixes lead to a kernel that all rules allow, of the same operation."""
    _, arch, _, changes = case
    correction = RULES.correct(_kernel(case).replace(**changes), arch)
    assert correction.is_valid, [str(item) for item in correction.remaining]
    assert correction.config.operation == _kernel(case).operation


def test_every_rule_has_a_case() -> None:
    elsewhere = {
        "arch_known",  # every arch has its block; see below
        "dtype_template", "mixed_dtype_template", "column_v_template", "learned_sink_template", "softcap_bias",
        "template_exists",  # test_fmha_templates
    }  # fmt: skip
    rules = {rule.__name__ for rule in RULES.rules}
    assert rules == {case[0] for case in CASES} | elsewhere


def test_every_rule_says_what_it_is_for() -> None:
    assert all(rule.__doc__ for rule in RULES.rules)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("family", list(Family))
def test_the_preferred_cut_of_every_family_is_valid(arch: ArchSpec, family: Family) -> None:
    config = valid(arch, family)
    assert RULES.check(config, arch) == ()


def test_an_arch_without_attention_has_no_kernels() -> None:
    import dataclasses

    bare = dataclasses.replace(CPU, operations=FrozenMap())
    assert [item.rule for item in RULES.check(valid(CPU), bare)] == ["arch_known"]


def test_the_limit_of_direct_copies_is_the_archs_own() -> None:
    """It was 160 KB everywhere: what fits the newest AMD GPU does not fit the others."""
    config = valid(NEW_AMD, pipeline="qr_async", hdim=(128, 128), dtype=D.BF16)
    large = config.replace(tile=(128, 64, 32, 128, 16, 128))
    assert not _of("lds_budget_async", large, NEW_AMD)
    assert _of("lds_budget_async", large, AMD)


def test_appending_prompts_of_different_lengths_is_allowed() -> None:
    """There, appending was for items of one size."""
    assert RULES.allows(valid(AMD, F.APPENDKV, mode=Mode.GROUP), AMD)

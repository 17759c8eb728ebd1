"""Receipts and profiles: which kernels each list takes, and the sets that they make."""

from __future__ import annotations

from typing import Any

import pytest
from fmha_configs import CPU, valid

import tilewright_arch
from tilewright_fmha.kernel_sets.profiles import DEFAULT_PROFILE, PROFILES, profile_of
from tilewright_fmha.kernel_sets.receipts import RECEIPTS, receipt_of
from tilewright_fmha.pipelines.generator import select_set
from tilewright_fmha.pipelines.kernel_sets import KERNEL_SETS
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.vocabulary import BiasKind, Family, FmhaDType, MaskKind, Mode, QScale, VLayout
from tilewright_kit.types.errors import NotFoundError

D = FmhaDType
NAMES = {
    0: "ck_default", 1: "ck_extended", 2: "flash_fwd", 3: "flash_bwd", 4: "pytorch", 100: "aiter_batch",
    200: "aiter_group", 300: "aiter_bwd_batch", 400: "aiter_bwd_group", 600: "aiter_cpp", 800: "fp32_all",
    801: "fp32_min", 888: "fp8_test",
}  # fmt: skip


def test_the_lists_have_the_seeds_numbers_and_names() -> None:
    assert {number: item.name for number, item in RECEIPTS.items()} == NAMES
    assert set(PROFILES) == {*NAMES.values(), "all"}
    assert DEFAULT_PROFILE == "ck_default"
    assert receipt_of(4) is profile_of("pytorch")


def test_unknown_lists_are_not_found() -> None:
    with pytest.raises(NotFoundError, match="no profile 'torch'") as error:
        profile_of("torch")
    assert "pytorch" in error.value.fix
    with pytest.raises(NotFoundError, match="no receipt '5'"):
        receipt_of(5)
    with pytest.raises(NotFoundError):
        select_set(CPU, receipt="nobody")


@pytest.mark.parametrize(
    ("name", "takes", "refuses"),
    [
        ("ck_default", [{"dtype": D.BF16}, {"dtype": D.FP8BF16}], [{"dtype": D.FP32}]),
        (
            "flash_fwd",
            [{}, {"bias": BiasKind.ALIBI}, {"softcap": True}, {"family": Family.APPENDKV}],
            [
                {"dtype": D.FP32},
                {"bias": BiasKind.ELEMENTWISE},
                {"mode": Mode.GROUP, "skip_min_seqlen_q": True},
                {"mask": MaskKind.WINDOW, "sink": True},
                {"family": Family.DQ_DK_DV},
            ],
        ),
        ("flash_bwd", [{"family": Family.DQ_DK_DV}], [{}, {"family": Family.DQ_DK_DV, "dtype": D.FP32}]),
        (
            "pytorch",
            [{}, {"bias": BiasKind.ELEMENTWISE}, {"family": Family.DQ_DK_DV}, {"family": Family.APPENDKV}],
            [
                {"bias": BiasKind.ALIBI},
                {"softcap": True},
                {"v_layout": VLayout.VC},
                {"family": Family.APPENDKV, "dtype": D.FP32},
            ],
        ),
        (
            "aiter_batch",
            [{}, {"dtype": D.FP8BF16, "hdim": (128, 128)}],
            [{"mode": Mode.GROUP}, {"dtype": D.FP8BF16, "hdim": (64, 64)}, {"dtype": D.FP8FP16}],
        ),
        ("aiter_group", [{"mode": Mode.GROUP}, {"mode": Mode.GROUP, "dtype": D.FP8BF16}], [{}]),
        ("aiter_bwd_batch", [{"family": Family.DQ_DK_DV}], [{"family": Family.DQ_DK_DV, "mode": Mode.GROUP}]),
        ("aiter_bwd_group", [{"family": Family.DQ_DK_DV, "mode": Mode.GROUP}], [{"family": Family.DQ_DK_DV}]),
        ("aiter_cpp", [{}, {"mode": Mode.GROUP}], [{"v_layout": VLayout.VC}]),
        ("fp32_all", [{"dtype": D.FP32}, {"dtype": D.FP32, "lse": True}], [{}, {"dtype": D.FP32, "softcap": True}]),
        (
            "fp32_min",
            [{"dtype": D.FP32, "hdim": (48, 48)}],
            [{"dtype": D.FP32}, {"dtype": D.FP32, "hdim": (128, 128), "lse": True}],
        ),
        (
            "fp8_test",
            [{"dtype": D.FP8FP32, "hdim": (192, 128), "qscale": QScale.PERTENSOR}],
            [{"dtype": D.FP8FP32}, {"hdim": (128, 128)}],
        ),
        ("all", [{}, {"dtype": D.FP32}, {"family": Family.APPENDKV}], []),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_what_a_list_takes(name: str, takes: list[dict[str, Any]], refuses: list[dict[str, Any]]) -> None:
    profile = profile_of(name)
    assert [fields for fields in takes if not profile.takes(valid(CPU, **fields))] == []
    assert [fields for fields in refuses if profile.takes(valid(CPU, **fields))] == []


@pytest.mark.parametrize("name", PROFILES)
def test_a_set_has_only_what_its_list_takes(name: str) -> None:
    profile, count = profile_of(name), 0
    for operation, sets in KERNEL_SETS.items():
        assert (name in sets) == (operation in profile.operations)
        for config in sets[name].expand(CPU, RULES) if name in sets else ():
            # What only takes part in plans is not chosen: it belongs to no list.
            assert profile.takes(config) and config.receipt == (profile.number if config.is_main else -1)
            count += 1
    assert count


def test_options_choose_from_a_list() -> None:
    found = select_set(CPU, receipt=4)
    assert found == select_set(CPU, profile="pytorch") == select_set(CPU, receipt="pytorch")
    causal = select_set(CPU, receipt=4, hdim=128, mask="causal")
    assert causal and all(config.hdim == (128, 128) and config.receipt == 4 for config in causal)
    chosen = select_set(CPU, receipt=2, rule_set="default")
    assert chosen and all(RECEIPTS[2].takes(config) and config.receipt == -1 for config in chosen)


def test_kernels_of_a_list_have_the_features_that_options_name() -> None:
    arch = tilewright_arch.load("gfx942")
    dropped = select_set(arch, receipt=2, family="fwd", dropout=True, mask="no")
    assert dropped
    assert all(config.dropout and config.mask is MaskKind.NONE for config in dropped)
    assert len(dropped) == len(select_set(arch, receipt=2, family="fwd", mask="no"))
    assert not select_set(arch, receipt="pytorch", softcap=True), "that list has no soft cap"


def test_the_extended_list_also_has_kernels_that_wait_for_what_they_load() -> None:
    arch = tilewright_arch.load("gfx942")
    usual, more = (set(select_set(arch, receipt=number, family="fwd")) for number in (0, 1))
    assert {config.pipeline for config in usual} == {"qr_async"}
    assert {config.pipeline for config in more} == {"qr", "qr_async"}
    assert {config.pipeline for config in select_set(arch, receipt=1, family="fwd", dropout=True)} == {"qr", "qr_async"}


@pytest.mark.parametrize("name", [name for name in tilewright_arch.names() if tilewright_arch.load(name).kind != "cpu"])
def test_lists_and_the_default_set_have_every_family_on_every_gpu(name: str) -> None:
    arch = tilewright_arch.load(name)
    caches = {Family.SPLITKV, Family.COMBINE, Family.PAGEDKV, Family.BATCH_PREFILL}
    for number in (0, 2, 4, 600, 800):
        assert {config.family for config in select_set(arch, receipt=number)} == {Family.FWD, *caches}, number
    for kernels in ("default", "essential"):
        found = {config.family for sets in KERNEL_SETS.values() for config in sets[kernels].expand(arch, RULES)}
        assert found == set(Family) - {Family.SCORES, Family.MERGE}, kernels  # of plans that ask for scores alone
    assert all(select_set(arch, receipt=number, family="fwd_appendkv") for number in (0, 2, 4))

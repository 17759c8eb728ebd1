"""Kernel sets: what every arch gets, and that declared kernels are what they should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fmha_configs import AMD, ARCHS, CPU, NVIDIA, all_templates

from tilewright_arch import ArchSpec
from tilewright_fmha.candidates.auxiliary_kernels import combine_of, convert_of, dot_of
from tilewright_fmha.config.warp_specialised import HEADS
from tilewright_fmha.pipelines.candidates import fmha_candidates, predict_fmha
from tilewright_fmha.pipelines.generator import GENERATE_OPTIONS, select_set
from tilewright_fmha.pipelines.kernel_sets import KERNEL_SETS, SET_NAMES
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.problem.parse.attention import parse_attention
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, OPERATIONS, Family, FmhaDType, MaskKind
from tilewright_kit.config.rules import RuleBook
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import ConfigInvalidError, InvalidArgumentError, NotFoundError
from tilewright_kit.types.tensor import TensorDesc

# The sets remember their expansions by arch and rules: those of this module are of its own book.
BOOK = RuleBook(RULES.rules)


@pytest.fixture(autouse=True)
def _templates() -> Iterator[None]:
    with all_templates():
        yield


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", [name for name in SET_NAMES if name != "full"])
def test_every_set_has_kernels_everywhere(arch: ArchSpec, operation: str, name: str) -> None:
    found = KERNEL_SETS[operation][name].expand(arch, BOOK)
    assert found and all(RULES.allows(config, arch) for config in found[::7])
    most = 180 if name == "default" and arch.name == "sm_90a" else 100  # Hopper has kernels of its own as well
    assert len(found) == 1 if name == "tiny" else len(found) <= most


@pytest.mark.parametrize("arch", [CPU, AMD, NVIDIA], ids=lambda arch: arch.name)
def test_the_default_set_shows_every_family_and_feature(arch: ArchSpec) -> None:
    found = [config for sets in KERNEL_SETS.values() for config in sets["default"].expand(arch, BOOK)]
    # Scores are written by one kernel for each element type, which test_fmha_scores.py compiles.
    assert {config.family for config in found} == set(Family) - {Family.SCORES, Family.MERGE}
    for name in ("lse", "dropout", "randval", "softcap", "sink", "learned_sinks", "paged", "deterministic", "dbias"):
        assert {getattr(config, name) for config in found} == {False, True}, name
    for name in ("mask", "bias", "qscale", "rope", "mode"):
        kinds = {getattr(config, name) for config in found}
        assert kinds == set(type(next(iter(kinds)))), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hdim", HEADS)
def test_the_default_set_has_what_hopper_takes_for_plain_problems(hdim: tuple[int, int], causal: bool) -> None:
    device, known = device_of(NVIDIA), set(KERNEL_SETS[ATTENTION]["default"].expand(NVIDIA, BOOK))
    for batch, heads, rows in ((4, 16, 4096), (1, 32, 2048), (1, 8, 1000), (8, 12, 512)):
        sizes = {"q": hdim[0], "k": hdim[0], "v": hdim[1]}
        tensors = {name: TensorDesc.of("bf16", (batch, heads, rows, size)) for name, size in sizes.items()}
        problem = parse_attention(OperationRequest(ATTENTION, tensors, {}, {"causal": causal}))
        found = fmha_candidates(problem, device)
        chosen = min(found, key=lambda config: predict_fmha(problem, config, device).seconds)
        assert chosen.pipeline == "ws" and chosen in known, chosen.name


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_companions_of_all_kernels_are_valid(arch: ArchSpec) -> None:
    splits = [item for item in KERNEL_SETS[ATTENTION]["default"].expand(arch, BOOK) if item.family is Family.SPLITKV]
    gradients = KERNEL_SETS[ATTENTION_BACKWARD]["default"].expand(arch, BOOK)
    assert splits and gradients
    for config in splits:
        assert RULES.check(combine_of(config, arch), arch) == ()
        assert combine_of(config, arch).family is Family.COMBINE
    for config in (item for item in gradients if item.family is Family.DQ_DK_DV):
        for companion in (dot_of(config, arch), convert_of(config, arch)):
            assert RULES.check(companion, arch) == ()
            assert (companion.dtype, companion.mode, companion.hdim) == (config.dtype, config.mode, config.hdim)


def test_companions_on_cpus_have_the_team_of_their_kernel() -> None:
    config = next(item for item in KERNEL_SETS[ATTENTION]["default"].expand(CPU, BOOK) if item.family is Family.SPLITKV)
    wide = config.replace(wave=(4, *config.wave[1:]))
    assert combine_of(wide, CPU).team == 4


# ---- select_set ----


def test_options_choose_from_a_set() -> None:
    every = select_set(CPU)
    assert select_set(CPU, rule_set="default") == every
    causal = select_set(CPU, rule_set="default", mask="bottom_right")
    assert causal == [config for config in every if config.mask is MaskKind.CAUSAL] != []
    heads = select_set(CPU, rule_set="default", hdim=[64, 128], datatype=["bf16", "fp16"])
    assert heads and {config.hdim for config in heads} == {(64, 64), (128, 128)}
    assert {config.dtype for config in heads} == {FmhaDType.BF16, FmhaDType.FP16}


def test_options_alone_describe_kernels() -> None:
    (one,) = select_set(CPU, hdim=128, datatype="bf16", mask="causal", lse=True)
    assert (one.hdim, one.dtype, one.mask, one.lse) == ((128, 128), FmhaDType.BF16, MaskKind.CAUSAL, True)
    rows = select_set(AMD, hdim=64, datatype="fp16", pipeline="qr", tile_m0=[64, 128])
    assert [config.m0 for config in rows] == [64, 128]
    (split,) = select_set(CPU, family="fwd_splitkv", hdim=64, datatype="fp32")
    assert split.family is Family.SPLITKV
    (gradient,) = select_set(CPU, ATTENTION_BACKWARD, hdim=64, datatype="fp32", deterministic=True)
    assert gradient.family is Family.DQ_DK_DV


def test_options_alone_get_a_cut_that_has_room_for_their_features() -> None:
    wide: dict[str, Any] = {"family": "fwd_pagedkv", "hdim": 256, "datatype": "bf16", "paged": True, "lse": True}
    (plain,), (window,) = select_set(NVIDIA, **wide), select_set(NVIDIA, **wide, mask="generic")
    assert plain.n0 > window.n0 and window.mask is MaskKind.WINDOW
    wide |= {"family": "batch_prefill", "mode": "group", "mask": "causal"}
    (causal,), (eight,) = select_set(NVIDIA, **wide), select_set(NVIDIA, **{**wide, "datatype": "fp8bf16"})
    assert causal.n0 > eight.n0 and eight.dtype is FmhaDType.FP8BF16


def test_a_family_names_its_operation() -> None:
    found = select_set(CPU, ATTENTION, family="fwd_appendkv", rule_set="default")
    assert found and {config.operation for config in found} == {"kv_append"}


def test_mistakes_are_named() -> None:
    with pytest.raises(NotFoundError, match="no kernel set 'huge'") as error:
        select_set(CPU, rule_set="huge")
    assert error.value.field == "rule_set"
    with pytest.raises(NotFoundError, match="no family 'sideways'"):
        select_set(CPU, family="sideways")
    with pytest.raises(InvalidArgumentError, match="no option 'colour'") as refused:
        select_set(CPU, colour="red")
    assert refused.value.field == "colour"
    with pytest.raises(InvalidArgumentError, match="expected true or false"):
        select_set(CPU, lse="yes")
    with pytest.raises(ConfigInvalidError) as invalid:
        select_set(CPU, hdim=60, datatype="fp32")
    assert invalid.value.rule == "hdim_multiple_of_8"
    assert len(set(GENERATE_OPTIONS)) == len(GENERATE_OPTIONS)

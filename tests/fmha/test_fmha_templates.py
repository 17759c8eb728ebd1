"""Features without a template are refused by name, with the nearest kernel that there is."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from fmha_configs import AMD, CPU, all_templates, valid

import tilewright_arch
from tilewright_fmha.config.config import CONFIGS
from tilewright_fmha.config.features import SWITCHES, features_of
from tilewright_fmha.pipelines import templates as template_table
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.pipelines.templates import TEMPLATES, missing, nearest
from tilewright_fmha.vocabulary import (
    OPERATIONS,
    BiasKind,
    Family,
    FmhaDType,
    KvLookup,
    MaskKind,
    Mode,
    QScale,
    VLayout,
)

_BARE = frozenset({"bf16", "fp16", "group", "paged_vllm", "causal", "bias", "softcap", "lse"})


def _with(*words: str, remove: tuple[str, ...] = (), pipeline: str = "qr", family: Family = Family.FWD) -> Any:
    table = {("cpu", pipeline, family): (_BARE | set(words)) - set(remove)}
    return patch.dict(template_table.TEMPLATES, table)


@pytest.mark.parametrize(
    ("rule", "fields", "fix"),
    [
        ("dtype_template", {"dtype": FmhaDType.FP8BF16}, {"dtype": FmhaDType.BF16}),
        ("mixed_dtype_template", {"dtype": FmhaDType.FP16FP8}, {"dtype": FmhaDType.FP16}),
        ("column_v_template", {"v_layout": VLayout.VC}, {"v_layout": VLayout.VR}),
        ("learned_sink_template", {"learned_sinks": True}, {"learned_sinks": False}),
        ("softcap_bias", {"softcap": True, "bias": BiasKind.ELEMENTWISE}, {"softcap": False}),
        ("template_exists", {"mask": MaskKind.WINDOW}, {"mask": MaskKind.NONE}),
        ("template_exists", {"bias": BiasKind.ALIBI}, {"bias": BiasKind.NONE}),
        ("template_exists", {"dropout": True}, {"dropout": False}),
        ("template_exists", {"mode": Mode.GROUP, "skip_min_seqlen_q": True}, {"skip_min_seqlen_q": False}),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_what_a_template_lacks_is_refused_by_its_rule(rule: str, fields: dict[str, Any], fix: dict[str, Any]) -> None:
    config = valid(CPU, **fields)
    assert RULES.allows(config, CPU)
    with _with():
        found = RULES.check(config, CPU)
        assert [item.rule for item in found] == [rule]
        other = nearest(config, "cpu")
        assert other is not None and other.name in found[0].reason
        assert dict(found[0].fix) == fix
        assert not [item for item in RULES.check(config.replace(**found[0].fix), CPU) if item.rule == rule]


def test_lookups_and_scales_give_way_to_what_there_is() -> None:
    fields: dict[str, Any] = {"kv_lookup": KvLookup.SGLANG, "dtype": FmhaDType.BF16}
    config = valid(CPU, Family.PAGEDKV, **fields)
    with _with(family=Family.PAGEDKV):
        assert RULES.correct(config, CPU).config == config.replace(kv_lookup=KvLookup.VLLM)
    scaled = valid(CPU, dtype=FmhaDType.FP8BF16, qscale=QScale.BLOCKSCALE)
    with _with("fp8bf16", "pertensor"):
        assert RULES.correct(scaled, CPU).config == scaled.replace(qscale=QScale.NONE)


def test_a_pipeline_without_a_template_names_the_nearest() -> None:
    config = valid(AMD, pipeline="qr", lse=True)
    with all_templates():
        assert RULES.allows(config.replace(pipeline="qs"), AMD)
    others = {key: words for key, words in TEMPLATES.items() if (key[0], key[2]) != ("hip", Family.FWD)}
    with patch.dict(TEMPLATES, {**others, ("hip", "qr", Family.FWD): _BARE}, clear=True):
        found = RULES.check(config.replace(pipeline="qs"), AMD)
        assert [(item.rule, item.field) for item in found] == [("template_exists", "pipeline")]
        assert dict(found[0].fix) == {"pipeline": "qr"}


def test_a_family_without_any_template_has_no_fix() -> None:
    lines = {key: words for key, words in TEMPLATES.items() if key[2] is not Family.FWD}
    with patch.dict(TEMPLATES, lines, clear=True):
        found = RULES.check(valid(CPU), CPU)
        assert [item.rule for item in found] == ["template_exists"] and not found[0].fix
        assert "there is no template of fwd" in found[0].reason
        assert nearest(valid(CPU), "cpu") is None and missing(valid(CPU), "cpu") == ()


def test_every_word_of_the_table_is_asked_by_some_kernel() -> None:
    """A word that no configuration asks for would promise nothing."""
    known = set(SWITCHES) | {"group", "paged_vllm", "paged_sglang"}
    known |= {item.value for item in FmhaDType}
    for key, words in TEMPLATES.items():
        assert words <= known, (key, words - known)


def test_features_are_what_differs_from_a_plain_kernel() -> None:
    assert features_of(valid(CPU)) == {"bf16"}
    config = valid(CPU, Family.PAGEDKV, kv_lookup=KvLookup.SGLANG, mask=MaskKind.CAUSAL)
    assert features_of(config) == {"bf16", "paged_sglang", "causal"}


@pytest.mark.parametrize("name", tilewright_arch.names())
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_configuration_without_any_field_is_corrected_to_a_kernel_of_every_arch(name: str, operation: str) -> None:
    arch = tilewright_arch.load(name)
    corrected = RULES.correct(CONFIGS[operation](), arch)
    assert corrected.is_valid
    assert not RULES.check(corrected.config, arch)

"""What there is a template for: (kind of arch, pipeline, family), and the features that each has.

A feature that is not in a line is refused by rule ``template_exists``, which names the nearest kernel that there is.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_fmha.config import FmhaConfig
from tilewright_fmha.words import BiasKind, Family, KvLayout, MaskKind, QScale, Rope, VLayout

__all__ = ["TEMPLATES", "features_of", "missing", "templates_of"]

_F = Family
_FORWARD = (_F.FWD, _F.SPLITKV, _F.PAGEDKV, _F.BATCH_PREFILL)
_TYPES = frozenset({"fp32", "fp16", "bf16"})
_FP8 = frozenset({"fp8fp16", "fp8bf16", "fp8fp32"})
_MIXED = frozenset({"fp16fp8", "bf16fp8"})
_SCALES = frozenset({"pertensor", "blockscale", "kv_blockscale"})
_PAGES = frozenset({"paged_vllm", "paged_sglang", "vectorized"})
_MASKS = frozenset({"causal", "window", "token_sink"})
_SCORES = _MASKS | {"bias", "alibi", "dropout", "randval", "softcap"}
_ALL_FORWARD = (
    _TYPES | _FP8 | _MIXED | _SCALES | _PAGES | _SCORES | {"group", "lse", "learned_sink", "skip_min", "column_v"}
)
_COMBINE = _TYPES | _FP8 | _MIXED | {"group", "lse", "learned_sink", "skip_min"}
_APPEND = _TYPES | _FP8 | _MIXED | _PAGES | {"group", "rope_interleaved", "rope_half", "column_v"}
_BACKWARD = _TYPES | _SCORES | {"group", "learned_sink", "skip_min", "dbias", "deterministic", "column_v"}

TEMPLATES: Mapping[tuple[str, str, Family], frozenset[str]] = {
    **{("cpu", "qr", family): _ALL_FORWARD for family in _FORWARD},
}
"""Every template adds its line with the commit that adds it."""


def templates_of(kind: str, family: Family) -> dict[str, frozenset[str]]:
    """The pipelines of a family on archs of a kind, and what they can do."""
    return {pipeline: words for (where, pipeline, what), words in TEMPLATES.items() if (where, what) == (kind, family)}


def features_of(config: FmhaConfig) -> frozenset[str]:
    """What a configuration asks of its template, in the table's words."""
    words = {config.dtype.value}
    words |= {word for word, asked in (
        ("group", config.varlen),
        ("causal", config.mask is MaskKind.CAUSAL),
        ("window", config.mask is MaskKind.WINDOW),
        ("bias", config.bias is BiasKind.ELEMENTWISE),
        ("alibi", config.bias is BiasKind.ALIBI),
        ("lse", config.lse),
        ("dropout", config.dropout),
        ("randval", config.randval),
        ("softcap", config.softcap),
        ("token_sink", config.sink),
        ("learned_sink", config.learned_sinks),
        ("skip_min", config.skip_min_seqlen_q),
        (f"paged_{config.kv_lookup}", config.paged),
        ("vectorized", config.paged and config.kv_layout is KvLayout.VECTORIZED),
        ("column_v", config.v_layout is VLayout.VC),
        (f"rope_{config.rope}", config.rope is not Rope.NONE),
        (config.qscale.value, config.qscale is not QScale.NO),
        ("dbias", config.dbias),
        ("deterministic", config.deterministic),
        ("atomics", config.family is Family.DQ_DK_DV and not config.deterministic),
        ("pack_gqa", config.pack_gqa),
        ("persistent", config.persistent),
        ("trload", config.use_trload),
        ("unpadded", not (config.pad_s and config.pad_sk and config.pad_d and config.pad_dv)),
    ) if asked}  # fmt: skip
    return frozenset(words)


def missing(config: FmhaConfig, kind: str) -> tuple[str, ...]:
    """What its template lacks; empty also where there is no template at all."""
    have = TEMPLATES.get((kind, config.pipeline, config.family))
    return () if have is None else tuple(sorted(features_of(config) - have))

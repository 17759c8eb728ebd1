"""Support of templates: (kind of arch, pipeline, family), and the features that each has.

A feature that is not in a line is refused by a rule that names the nearest kernel that there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.vocabulary import (
    BiasKind,
    Family,
    FmhaDType,
    KvLayout,
    KvLookup,
    MaskKind,
    Mode,
    QScale,
    Rope,
    VLayout,
)

__all__ = ["TEMPLATES", "features_of", "missing", "nearest", "templates_of"]

_F = Family
_FORWARD = (_F.FWD, _F.SPLITKV, _F.PAGEDKV, _F.BATCH_PREFILL)
_TYPES = frozenset({"fp32", "fp16", "bf16"})
_FP8 = frozenset({"fp8fp16", "fp8bf16", "fp8fp32"})
_MIXED = frozenset({"fp16fp8", "bf16fp8"})
_SCALES = frozenset({"pertensor", "blockscale", "kv_blockscale"})
_PLAIN_PAGES = frozenset({"paged_vllm", "paged_sglang"})
_PAGES = _PLAIN_PAGES | {"vectorized", "page_compiled"}
_MASKS = frozenset({"causal", "window", "token_sink"})
_SCORES = _MASKS | {"bias", "alibi", "dropout", "randval", "softcap", "softcap_bias"}
_ALL_FORWARD = (
    _TYPES | _FP8 | _MIXED | _SCALES | _PAGES | _SCORES | {"group", "lse", "learned_sink", "skip_min", "column_v"}
)
_SPECIALISED = frozenset({
    "fp16", "bf16", "group", "causal", "window", "token_sink", "softcap", "lse", "learned_sink", "skip_min",
    "persistent", "stages",
})  # fmt: skip
_COMBINE = _TYPES | _FP8 | _MIXED | {"group", "lse", "learned_sink", "skip_min"}
_APPEND = _TYPES | _FP8 | _MIXED | _PAGES | {"group", "rope_interleaved", "rope_half"}
_BACKWARD = _TYPES | _SCORES | {"group", "learned_sink", "skip_min", "dbias", "deterministic", "column_v"}
_BACKWARD_PARTS = _TYPES | {"group", "learned_sink", "skip_min", "bias", "dbias", "deterministic"}

_PORTABLE = (
    ("qr_async", _F.FWD), ("qr", _F.FWD), ("qr", _F.SPLITKV), ("qr_pagedkv", _F.PAGEDKV),
    ("qr_async", _F.BATCH_PREFILL), ("qr", _F.BATCH_PREFILL),
)  # fmt: skip
"""Loops on the portable blocks of GPUs."""

TEMPLATES: Mapping[tuple[str, str, Family], frozenset[str]] = {
    **{("cpu", "qr", family): _ALL_FORWARD for family in _FORWARD},
    **{
        (kind, pipeline, family): _ALL_FORWARD | {"pack_gqa"}
        for kind in ("cuda", "hip")
        for pipeline, family in _PORTABLE
    },
    ("cuda", "ws", _F.FWD): _SPECIALISED,
    ("cuda", "ws", _F.SPLITKV): _SPECIALISED | _MIXED | _PLAIN_PAGES | {"pack_gqa", "pertensor"},
    **{("cuda", "ws", family): _SPECIALISED | _PLAIN_PAGES for family in (_F.PAGEDKV, _F.BATCH_PREFILL)},
    ("cuda", "qr_nwarp_sshuffle", _F.SPLITKV): _ALL_FORWARD - {"fp32"} | {"pack_gqa"},
    **{(kind, "splitkv_combine", _F.COMBINE): _COMBINE for kind in ("cuda", "hip")},
    **{(kind, "appendkv", _F.APPENDKV): _APPEND for kind in ("cuda", "hip")},
    **{(kind, "bwd", _F.DQ_DK_DV): _BACKWARD | {"atomics"} for kind in ("cuda", "hip")},
    **{(kind, "bwd", family): _BACKWARD_PARTS for kind in ("cuda", "hip") for family in (_F.DOT_DO_O, _F.CONVERT_DQ)},
    ("cpu", "splitkv_combine", _F.COMBINE): _COMBINE,
    ("cpu", "appendkv", _F.APPENDKV): _APPEND,
    ("cpu", "bwd", _F.DQ_DK_DV): _BACKWARD,
    ("cpu", "bwd", _F.DOT_DO_O): _BACKWARD_PARTS,
    ("cpu", "bwd", _F.CONVERT_DQ): _BACKWARD_PARTS,
}
"""Every template adds its line with the commit that adds it."""

_SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "causal": {"mask": MaskKind.NONE},
    "window": {"mask": MaskKind.NONE, "sink": False},
    "token_sink": {"sink": False},
    "bias": {"bias": BiasKind.NONE, "dbias": False},
    "alibi": {"bias": BiasKind.NONE},
    "softcap_bias": {"softcap": False},
    "lse": {"lse": False},
    "dropout": {"dropout": False, "randval": False},
    "randval": {"randval": False},
    "softcap": {"softcap": False},
    "learned_sink": {"learned_sinks": False},
    "skip_min": {"skip_min_seqlen_q": False},
    "vectorized": {"kv_layout": KvLayout.LINEAR},
    "page_compiled": {"page_size": 0},
    "column_v": {"v_layout": VLayout.VR},
    "rope_interleaved": {"rope": Rope.NONE},
    "rope_half": {"rope": Rope.NONE},
    "pertensor": {"qscale": QScale.NONE},
    "blockscale": {"qscale": QScale.NONE},
    "kv_blockscale": {"qscale": QScale.NONE},
    "dbias": {"dbias": False},
    "deterministic": {"deterministic": False},
    "atomics": {"deterministic": True},
    "pack_gqa": {"pack_gqa": False},
    "persistent": {"persistent": False},
    "stages": {"stages": 0},
    "trload": {"use_trload": False},
    "blocks": {"block_per_cu": -1},
    "unpadded": {"pad_s": True, "pad_sk": True, "pad_d": True, "pad_dv": True},
}
"""Fix that turns a feature off."""


def templates_of(kind: str, family: Family) -> dict[str, frozenset[str]]:
    """The pipelines of a family on archs of a kind, and what they can do."""
    return {pipeline: words for (where, pipeline, what), words in TEMPLATES.items() if (where, what) == (kind, family)}


def features_of(config: FmhaConfig) -> frozenset[str]:
    """Features that a configuration requires of its template, in the table's words."""
    asked = {
        "group": config.varlen,
        "causal": config.mask is MaskKind.CAUSAL,
        "window": config.mask is MaskKind.WINDOW,
        "bias": config.bias is BiasKind.ELEMENTWISE,
        "alibi": config.bias is BiasKind.ALIBI,
        "softcap_bias": config.softcap and config.bias is not BiasKind.NONE,
        "lse": config.lse,
        "dropout": config.dropout,
        "randval": config.randval,
        "softcap": config.softcap,
        "token_sink": config.sink,
        "learned_sink": config.learned_sinks,
        "skip_min": config.skip_min_seqlen_q,
        "paged_vllm": config.paged and config.kv_lookup is KvLookup.VLLM,
        "paged_sglang": config.paged and config.kv_lookup is KvLookup.SGLANG,
        "vectorized": config.paged and config.kv_layout is KvLayout.VECTORIZED,
        "page_compiled": config.page_size > 0,
        "column_v": config.v_layout is VLayout.VC,
        "rope_interleaved": config.rope is Rope.INTERLEAVED,
        "rope_half": config.rope is Rope.HALF,
        "dbias": config.dbias,
        "deterministic": config.deterministic,
        "atomics": config.family is Family.DQ_DK_DV and not config.deterministic,
        "pack_gqa": config.pack_gqa,
        "persistent": config.persistent,
        "stages": config.stages > 0,
        "trload": config.use_trload,
        "blocks": config.block_per_cu != -1,
        "unpadded": not (config.pad_s and config.pad_sk and config.pad_d and config.pad_dv),
    }
    words = {word for word, holds in asked.items() if holds}
    if config.qscale is not QScale.NONE:
        words.add(config.qscale.value)
    return frozenset({*words, config.dtype.value})


def missing(config: FmhaConfig, kind: str) -> tuple[str, ...]:
    """Features that its template lacks; empty also where there is no template at all."""
    have = TEMPLATES.get((kind, config.pipeline, config.family))
    return () if have is None else tuple(sorted(features_of(config) - have))


def nearest(config: FmhaConfig, kind: str) -> FmhaConfig | None:
    """The configuration with the fewest features less that there is a template for; None if the family has none."""
    found = templates_of(kind, config.family)
    if not found:
        return None
    asked = features_of(config)
    # Its own pipeline first among equals, then the table's order.
    places = {pipeline: place for place, pipeline in enumerate(found)}
    own = config.pipeline
    pipeline = min(found, key=lambda name: (len(asked - found[name]), name != own, places[name]))
    changes: dict[str, Any] = {"pipeline": pipeline}
    for word in sorted(asked - found[pipeline]):
        changes |= _without(word, config, found[pipeline])
    return config.replace(**changes)


def _without(word: str, config: FmhaConfig, have: frozenset[str]) -> Mapping[str, Any]:
    if word == config.dtype.value:
        other = next((name for name in (config.o.value, config.q.value) if name in have), None)
        return {"dtype": FmhaDType(other or min(have & {item.value for item in FmhaDType}))}
    if word == "group":
        return {"mode": Mode.BATCH}
    if word.startswith("paged_"):
        lookups = [item for item in KvLookup if f"paged_{item}" in have]
        return {"kv_lookup": lookups[0]} if lookups else {"paged": False}
    return _SWITCHES[word]

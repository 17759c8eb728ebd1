"""Features that configurations require of templates, and the fixes that turn each off."""

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

__all__ = ["SWITCHES", "features_of", "without"]

SWITCHES: Mapping[str, Mapping[str, Any]] = {
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


def without(word: str, config: FmhaConfig, have: frozenset[str]) -> Mapping[str, Any]:
    """Fields of a kernel that does without a feature, of which its template lacks ``word`` and has ``have``."""
    if word == config.dtype.value:
        other = next((name for name in (config.o.value, config.q.value) if name in have), None)
        return {"dtype": FmhaDType(other or min(have & {item.value for item in FmhaDType}))}
    if word == "group":
        return {"mode": Mode.BATCH}
    if word.startswith("paged_"):
        lookups = [item for item in KvLookup if f"paged_{item}" in have]
        return {"kv_lookup": lookups[0]} if lookups else {"paged": False}
    return SWITCHES[word]

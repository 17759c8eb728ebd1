"""Rules on families: what each must be, what means nothing to it, and what there is a template for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import ADVICE_FIELDS, SIGNATURE_FIELDS, FmhaConfig
from tilewright_fmha.config.defaults import ELEMENTWISE, default_of
from tilewright_fmha.config.judging import is_well_formed, must_be, plain, replaced
from tilewright_fmha.config.pipelines import family_pipelines, is_specialised
from tilewright_fmha.vocabulary import Family, Mode, QScale, Scheduling, VLayout
from tilewright_kit.config.rules import Violation

__all__ = ["FAMILY_RULES"]

MAX_PAGE, MAX_SPLITS_LOG2 = 1024, 10

_ALWAYS = frozenset({"family", "dtype", "mode", "hdim"})
_SCORES = frozenset(
    {"mask", "bias", "dtype_bias", "dropout", "softcap", "sink", "learned_sinks", "skip_min_seqlen_q", "randval"}
)
_FORWARD = _ALWAYS | _SCORES | {"v_layout", "lse", "qscale"}
_CACHE = frozenset({"paged", "kv_layout", "kv_lookup", "page_size"})
_MEANT: Mapping[Family, frozenset[str]] = {
    Family.FWD: _FORWARD,
    **dict.fromkeys((Family.SPLITKV, Family.PAGEDKV, Family.BATCH_PREFILL), _FORWARD | _CACHE),
    Family.COMBINE: _ALWAYS | {"lse", "learned_sinks", "skip_min_seqlen_q"},
    Family.MERGE: _ALWAYS | {"skip_min_seqlen_q"},
    Family.SCORES: _ALWAYS | {"bias", "dtype_bias", "paged", "kv_lookup"},
    Family.APPENDKV: _ALWAYS | _CACHE | {"rope", "rope_dtype", "qscale"},
    Family.DQ_DK_DV: _ALWAYS | _SCORES | {"v_layout", "dbias", "deterministic"},
    Family.DOT_DO_O: _ALWAYS | {"learned_sinks", "skip_min_seqlen_q", "bias", "dtype_bias", "dbias", "deterministic"},
    Family.CONVERT_DQ: _ALWAYS | {"skip_min_seqlen_q", "bias", "dtype_bias", "dbias", "deterministic"},
}
"""Fields of the signature that say something about a family's kernels."""


def family_fields(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Fields without meaning for a kernel have their default, so that equal kernels have equal names."""
    means = _MEANT[config.family]
    for name in SIGNATURE_FIELDS:
        if name not in means:
            reason = f"it means nothing to kernels of {config.family}"
            yield from must_be("family_fields", config, name, default_of(name, config.family), reason)
    for name, wanted, why in _meaningless(config, arch):
        have = getattr(config, name)
        if have != wanted:
            yield Violation("family_fields", name, plain(have), why, {name: wanted})
    if config.max_splits_log2 not in range(MAX_SPLITS_LOG2 + 1):
        reason = f"plans have 1 to {1 << MAX_SPLITS_LOG2} parts"
        fix = {"max_splits_log2": min(max(config.max_splits_log2, 0), MAX_SPLITS_LOG2)}
        yield Violation("family_fields", "max_splits_log2", config.max_splits_log2, reason, fix)
    elif config.family is Family.SPLITKV and not 0 <= config.num_splits <= config.max_splits:
        reason = f"plans of the kernel have up to {config.max_splits} parts"
        yield Violation("family_fields", "num_splits", config.num_splits, reason, {"num_splits": 0})


def _meaningless(config: FmhaConfig, arch: ArchSpec) -> Iterator[tuple[str, Any, str]]:
    """Fields whose meaning depends on others, and the value that they have without it."""
    no_bias, no_rope = config.bias.value != "elementwise", config.rope.value == "none"
    if no_bias:
        yield "dtype_bias", default_of("dtype_bias"), "there is no elementwise bias"
    if no_rope:
        yield "rope_dtype", default_of("rope_dtype"), "nothing is rotated"
    if not config.paged:
        for name in ("kv_layout", "kv_lookup", "page_size"):
            yield name, default_of(name), "there are no pages"
    if config.family is not Family.SPLITKV:
        yield "num_splits", 0, "only split kernels cut keys"
        yield "max_splits_log2", 0, "only split kernels cut keys"
    if not config.is_main:
        for name in ADVICE_FIELDS:
            yield name, default_of(name, config.family), "a kernel that only takes part in plans is not chosen"
    if not is_specialised(config):
        yield "scheduler", Scheduling.DEFAULT, "only warp-specialised kernels have consumers that alternate"
    if not config.is_forward:
        for name in ("pack_gqa", "persistent", "stages"):
            yield name, default_of(name), f"it means nothing to kernels of {config.family}"
    if config.family in ELEMENTWISE or arch.kind == "cpu":
        for name in ("pad_s", "pad_sk", "pad_d", "pad_dv"):
            yield name, True, "kernels without products, and those of CPUs, handle every size"
    if config.pad_d and config.pad_dv:
        yield "hdim_align", (8, 8), "a kernel that pads takes heads of any size"


# ---- the forms of families ----


def batch_prefill_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Batch prefill: sequences of different lengths over a paged cache, values row by row, and its own pipelines."""
    if config.family is not Family.BATCH_PREFILL:
        return
    rule = "batch_prefill_form"
    yield from must_be(rule, config, "v_layout", VLayout.VR, "values of a cache lie row by row")
    yield from must_be(rule, config, "paged", True, "it reads a paged cache")
    more = {"pad_s": True, "pad_sk": True}
    yield from must_be(rule, config, "mode", Mode.GROUP, "its sequences of queries differ in length", more)
    yield from _page_power(rule, config)
    yield from _family_pipeline(rule, config, arch)


def append_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Appending has a pipeline of its own. Unlike there, prompts of different lengths (``group``) may be appended."""
    if config.family is Family.APPENDKV:
        yield from _page_power("append_form", config)
        yield from _family_pipeline("append_form", config, arch)
        if config.qscale is not QScale.NONE and config.kv.bytes == 1 and config.q.bytes == 1:
            reason = "rows that are 8-bit floats already are stored as they come"
            yield Violation("append_form", "qscale", config.qscale.value, reason, {"qscale": QScale.NONE})
        elif config.qscale not in (QScale.NONE, QScale.PERTENSOR):
            reason = "new rows are divided by one factor for each sequence and head"
            yield Violation("append_form", "qscale", config.qscale.value, reason, {"qscale": QScale.PERTENSOR})


def combine_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Parts are combined in columns of the arch's width, which divides the heads of v; so do kernels whose parts they
    are.
    """
    spec = attention_of(arch)
    if spec is None or config.family not in (Family.COMBINE, Family.SPLITKV):
        return
    columns = spec.combine_columns
    if config.family is Family.COMBINE:
        yield from _family_pipeline("combine_form", config, arch)
        if is_well_formed(config) and config.n1 != columns:
            reason = f"n1 is {columns} columns"
            yield Violation("combine_form", "tile", config.tile, reason, {"tile": replaced(config.tile, 3, columns)})
    if config.hdim[1] % columns:
        other = spec.hdim_for(config.dtype.value, *config.hdim, columns) or (config.hdim[0], columns * 2)
        reason = f"{columns} columns are combined at a time, which does not divide {config.hdim[1]}"
        yield Violation("combine_form", "hdim", config.hdim, reason, {"hdim": other})


def pagedkv_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Paged kernels: a paged cache, values row by row, and a pipeline of their own where the arch has it."""
    if config.family is not Family.PAGEDKV:
        return
    yield from must_be("pagedkv_form", config, "paged", True, "it reads a paged cache")
    yield from must_be("pagedkv_form", config, "v_layout", VLayout.VR, "values of a cache lie row by row")
    reason = "sequences of different numbers of queries over a cache are batch_prefill's"
    yield from must_be("pagedkv_form", config, "mode", Mode.BATCH, reason)
    yield from _page_power("pagedkv_form", config)
    yield from _family_pipeline("pagedkv_form", config, arch)


def splitkv_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """Split kernels: values row by row, and pipelines whose results can be combined."""
    if config.family is not Family.SPLITKV:
        return
    yield from must_be("splitkv_form", config, "v_layout", VLayout.VR, "values that are cut lie row by row")
    yield from _page_power("splitkv_form", config)
    yield from _family_pipeline("splitkv_form", config, arch)


def _family_pipeline(rule: str, config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    offered = family_pipelines(config.family, arch)
    if config.pipeline not in offered:
        reason = f"kernels of {config.family} on {arch.id} have pipelines {', '.join(offered)}"
        yield Violation(rule, "pipeline", config.pipeline, reason, {"pipeline": offered[0]})


def _page_power(rule: str, config: FmhaConfig) -> Iterator[Violation]:
    size = config.page_size
    if size and (size & (size - 1) or not 1 <= size <= MAX_PAGE):
        reason = f"pages have a power of two of tokens, up to {MAX_PAGE}"
        yield Violation(rule, "page_size", size, reason, {"page_size": 0})


FAMILY_RULES = (batch_prefill_form, append_form, combine_form, pagedkv_form, splitkv_form, family_fields)

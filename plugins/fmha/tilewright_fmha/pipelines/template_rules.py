"""Rules on templates: a kernel's features are among those of its template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.features import features_of
from tilewright_fmha.config.judging import plain
from tilewright_fmha.pipelines.templates import missing, nearest, templates_of
from tilewright_fmha.vocabulary import FmhaDType
from tilewright_kit.config.rules import Violation

__all__ = ["TEMPLATE_RULES"]


def _lacking(rule: str, config: FmhaConfig, arch: ArchSpec, words: frozenset[str], field: str) -> Iterator[Violation]:
    """The template lacks one of ``words``, which ``field`` asks for."""
    lacked = [word for word in missing(config, arch.kind) if word in words]
    other = nearest(config, arch.kind) if lacked else None
    if other is None:
        return
    fix = _changes(config, other)
    reason = (
        f"no kernel of {config.family} by pipeline {config.pipeline} on {arch.kind} devices has {', '.join(lacked)}; "
        f"the nearest is {other.name}"
    )
    yield Violation(rule, field, plain(getattr(config, field)), reason, fix)


def _changes(config: FmhaConfig, other: FmhaConfig) -> dict[str, Any]:
    return {
        name: getattr(other, name) for name in config.field_names() if getattr(other, name) != getattr(config, name)
    }


_DTYPES = frozenset(item.value for item in FmhaDType)
_MIXED = frozenset(item.value for item in FmhaDType if item.is_mixed)
_NAMED = {"learned_sink", "column_v", "softcap_bias"} | _DTYPES


def dtype_template(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The template computes with these element types."""
    return _lacking("dtype_template", config, arch, _DTYPES - _MIXED, "dtype")


def mixed_dtype_template(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The template has queries of 16 bits over keys and values of 8."""
    return _lacking("mixed_dtype_template", config, arch, _MIXED, "dtype")


def column_v_template(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The template reads values column by column."""
    return _lacking("column_v_template", config, arch, frozenset({"column_v"}), "v_layout")


def learned_sink_template(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The template has learned sinks."""
    return _lacking("learned_sink_template", config, arch, frozenset({"learned_sink"}), "learned_sinks")


def softcap_bias(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The template adds a bias after the soft cap. (Where this rule comes from, no kernel could.)"""
    return _lacking("softcap_bias", config, arch, frozenset({"softcap_bias"}), "softcap")


def template_exists(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """There is a template of the pipeline for the family on devices of this kind, and it has all other features."""
    found = templates_of(arch.kind, config.family)
    if config.pipeline not in found:
        other = nearest(config, arch.kind)
        if other is None:
            reason = f"there is no template of {config.family} for {arch.kind} devices"
            yield Violation("template_exists", "family", config.family.value, reason)
            return
        reason = (
            f"there is no template of pipeline {config.pipeline} for {arch.kind} devices; the nearest: {other.name}"
        )
        yield Violation("template_exists", "pipeline", config.pipeline, reason, _changes(config, other))
        return
    rest = features_of(config) - _NAMED
    yield from _lacking("template_exists", config, arch, frozenset(rest), "pipeline")


TEMPLATE_RULES = (
    dtype_template, mixed_dtype_template, column_v_template, learned_sink_template, softcap_bias, template_exists,
)  # fmt: skip

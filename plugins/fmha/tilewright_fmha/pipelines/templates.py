"""Templates of all pipelines, and the nearest one to a configuration that has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.features import features_of, without
from tilewright_fmha.pipelines.records import PIPELINES
from tilewright_fmha.vocabulary import Family

__all__ = ["TEMPLATES", "missing", "nearest", "templates_of"]

TEMPLATES: Mapping[tuple[str, str, Family], frozenset[str]] = {
    key: features for record in PIPELINES for key, features in record.templates.items()
}
"""Features of each template, by kind of device, pipeline and family."""


def templates_of(kind: str, family: Family) -> dict[str, frozenset[str]]:
    """The pipelines of a family on archs of a kind, and what they can do."""
    return {pipeline: words for (where, pipeline, what), words in TEMPLATES.items() if (where, what) == (kind, family)}


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
        changes |= without(word, config, found[pipeline])
    return config.replace(**changes)

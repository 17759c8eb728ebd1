"""Cuts of GPU kernels for a signature, by all pipelines of its family; configurations that leave theirs to the arch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import AUTO, FmhaConfig
from tilewright_fmha.config.defaults import ELEMENTWISE, cpu_algorithm, elementwise_algorithm
from tilewright_fmha.config.pipelines import family_pipelines
from tilewright_fmha.pipelines.records import record_of
from tilewright_fmha.pipelines.rulebook import CUT_RULES, RULES
from tilewright_fmha.pipelines.templates import templates_of
from tilewright_fmha.vocabulary import Family
from tilewright_kit.config.rules import Correction, RuleBook, Violation

__all__ = ["CompletedRules", "completed", "is_free", "valid_algorithms"]


def _algorithms(config: FmhaConfig, arch: ArchSpec) -> Iterator[Mapping[str, Any]]:
    """Pipeline, tile, waves and warp tiles worth trying, the preferred first; not all of them need be valid."""
    if config.family in ELEMENTWISE:
        yield elementwise_algorithm(config, arch)
        return
    for pipeline in family_pipelines(config.family, arch):
        record = record_of(pipeline, arch.kind)
        for shapes in record.cuts(config, arch, pipeline) if record else ():
            yield {"pipeline": pipeline, "use_trload": pipeline == "qr_async_trload", **shapes}


def valid_algorithms(config: FmhaConfig, arch: ArchSpec) -> tuple[Mapping[str, Any], ...]:
    """Those of them that fit the device; whether there are templates is for other rules to say."""
    names = ("family", "dtype", "mode", "hdim", "v_layout", "qscale", "paged", "page_size")
    bare = type(config)(**{name: getattr(config, name) for name in names})
    return _valid(bare, arch)


@lru_cache(maxsize=1024)
def _valid(config: FmhaConfig, arch: ArchSpec) -> tuple[Mapping[str, Any], ...]:
    found = []
    for item in _algorithms(config, arch):
        cut = config.replace(**item)
        if not any(True for rule in CUT_RULES for _ in rule(cut, arch)):
            found.append(item)
    return tuple(found)


# ---- what a configuration leaves to the arch ----

_FREE: Mapping[str, Any] = {"pipeline": AUTO, "tile": (), "wave": (), "warp_tile": ()}
"""Fields of the algorithm, and the value of each that nobody filled."""


def is_free(config: FmhaConfig, field: str) -> bool:
    """True if nobody filled this field of the algorithm."""
    return field in _FREE and bool(getattr(config, field) == _FREE[field])


def completed(config: FmhaConfig, arch: ArchSpec) -> FmhaConfig:
    """``config`` with every free field as the arch prefers it beside those that are given; the same if none is free, or
    the arch has no attention.
    """
    free = [name for name, value in _FREE.items() if getattr(config, name) == value]
    if not free or attention_of(arch) is None:
        return config
    cuts = (cpu_algorithm(config, arch),) if arch.kind == "cpu" else valid_algorithms(config, arch)
    if "pipeline" in free and not any("atomics" in words for words in templates_of(arch.kind, config.family).values()):
        config = config.replace(deterministic=config.family is Family.DQ_DK_DV)  # there are no others
    given = [name for name in _FREE if name not in free]
    fitting = [cut for cut in cuts if all(cut[name] == getattr(config, name) for name in given)] or list(cuts)
    made = [config.replace(**{name: value for name, value in cut.items() if name not in given}) for cut in fitting]
    return next((item for item in made if RULES.allows(item, arch)), made[0] if made else config)


class CompletedRules(RuleBook[FmhaConfig]):
    """The rules of kernels as they are built: what a configuration leaves to the arch is filled before it is judged."""

    def check(self, config: FmhaConfig, arch: ArchSpec) -> tuple[Violation, ...]:
        return super().check(completed(config, arch), arch)

    def allows(self, config: FmhaConfig, arch: ArchSpec) -> bool:
        return super().allows(completed(config, arch), arch)

    def correct(self, config: FmhaConfig, arch: ArchSpec) -> Correction[FmhaConfig]:
        """A configuration that is valid stays as it is, what it leaves open too."""
        return (
            Correction(config, (), ()) if self.allows(config, arch) else super().correct(completed(config, arch), arch)
        )

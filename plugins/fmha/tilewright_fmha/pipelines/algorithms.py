"""Cuts of GPU kernels for a signature, by all pipelines of its family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.defaults import ELEMENTWISE, elementwise_algorithm
from tilewright_fmha.config.pipelines import family_pipelines
from tilewright_fmha.pipelines.records import record_of
from tilewright_fmha.pipelines.rulebook import CUT_RULES

__all__ = ["valid_algorithms"]


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

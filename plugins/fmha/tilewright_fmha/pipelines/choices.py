"""Choices that ``ANY`` stands for in declarations of attention kernels: values that suit the arch, from its own
tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import FmhaConfig, config_of
from tilewright_fmha.config.defaults import cpu_algorithm, cpu_register_tiles
from tilewright_fmha.config.pipelines import family_pipelines
from tilewright_fmha.pipelines.algorithms import valid_algorithms
from tilewright_fmha.pipelines.templates import TEMPLATES, missing
from tilewright_fmha.vocabulary import Family, FmhaDType, KvLayout, KvLookup

__all__ = ["first_offered", "offered"]

_SHAPES = ("tile", "wave", "warp_tile")


def offered(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterable[Any] | None:
    """Values for a field, given those that are known. None: flags and enumerations take all their values."""
    spec = attention_of(arch)
    if spec is None:
        return ()
    if field == "dtype":
        return [FmhaDType(name) for name in spec.dtypes]
    if field == "hdim":
        return spec.hdims.get(FmhaDType(partial["dtype"]).value, ())
    if field == "pipeline":
        family = Family(partial["family"])
        named = family_pipelines(family, arch)
        plain = config_of(family)(family=family, dtype=FmhaDType(partial["dtype"]))
        keys = [(arch.kind, name, family) for name in named]
        found = [name for name, key in zip(named, keys, strict=True) if key in TEMPLATES]
        return [name for name in found if not missing(plain.replace(pipeline=name), arch.kind)] or found or named
    if field == "kv_layout":
        return [KvLayout(name) for name in spec.kv_layouts]
    if field == "kv_lookup":
        return [KvLookup(name) for name in spec.kv_lookups]
    if field == "page_size":
        return (0, *spec.page_sizes)
    return _shapes(field, arch, partial) if field in _SHAPES else None


def first_offered(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterable[Any] | None:
    """Only the preferred of these values."""
    values = offered(field, arch, partial)
    return None if values is None else tuple(values)[:1]


def _shapes(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> list[Any]:
    """Tiles, waves and warp tiles go together: each field offers what goes with those before it."""
    names = ("family", "dtype", "mode", "v_layout", "hdim", "pipeline", "page_size", "paged", "qscale")
    family = Family(partial.get("family", Family.FWD))
    known = {name: partial[name] for name in names if name in partial}
    config = config_of(family)(**known)
    given = [name for name in _SHAPES if name in partial and name != field]
    fitting = (item for item in _algorithms(config, arch) if all(item[name] == partial[name] for name in given))
    return list(dict.fromkeys(item[field] for item in fitting))


def _algorithms(config: FmhaConfig, arch: ArchSpec) -> Iterable[Mapping[str, Any]]:
    if arch.kind == "cpu":
        return [cpu_algorithm(config, arch, 1, shape) for shape in cpu_register_tiles(arch)[:2]]
    return [item for item in valid_algorithms(config, arch) if item["pipeline"] == config.pipeline]

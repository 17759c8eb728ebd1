"""Default algorithms: how a kernel of some signature is cut if nobody says, from the arch's own tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import AttentionSpec, attention_of
from tilewright_fmha.config.config import FmhaConfig, config_of
from tilewright_fmha.vocabulary import Family, FmhaDType
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import UnsupportedError

__all__ = [
    "ELEMENTWISE",
    "cpu_algorithm",
    "cpu_columns",
    "cpu_depth",
    "cpu_register_tiles",
    "cpu_tile",
    "default_of",
    "elementwise_algorithm",
    "elementwise_tile",
    "spec_of",
]

ELEMENTWISE = (
    Family.COMBINE, Family.SCORES, Family.MERGE, Family.APPENDKV, Family.DOT_DO_O, Family.CONVERT_DQ,
)  # fmt: skip
"""Families without a product of matrices on tiles that differ: each is cut in one way."""

_CPU_ROWS, _CPU_COLUMNS, _FEW_COLUMNS = 64, 256, 128
"""Rows of queries and columns of keys of a CPU's block, about; fewer columns where the second-level cache is small, and
of gradients, which keep more blocks in it.
"""
_LARGE_CACHE = 3 << 18
_REGISTER_ROWS = 8
_PIPELINES = {
    Family.COMBINE: "splitkv_combine",
    Family.SCORES: "qr",
    Family.MERGE: "splitkv_combine",
    Family.APPENDKV: "appendkv",
    Family.DQ_DK_DV: "bwd",
    Family.DOT_DO_O: "bwd",
    Family.CONVERT_DQ: "bwd",
}
_PAIRS = (DType.BF16, DType.FP8, DType.BF8)


def spec_of(arch: ArchSpec) -> AttentionSpec:
    """Section of the arch for attention. Raises ``UnsupportedError`` if it has none."""
    spec = attention_of(arch)
    if spec is None:
        raise UnsupportedError(
            f"{arch.id} has no kernels of attention",
            field="arch",
            value=arch.id,
            rule="arch_known",
            fix="use another device",
        )
    return spec


@cache
def default_of(name: str, family: Family = Family.FWD) -> Any:
    """The default of a configuration's field."""
    return next(item.default for item in fields(config_of(family)) if item.name == name)


def cpu_depth(dtype: FmhaDType) -> int:
    """Values of a dot product's step: pairs of bf16, in which all 8-bit floats are exact, or single fp32."""
    return 2 if dtype.q in _PAIRS and dtype.kv in _PAIRS else 1


def cpu_register_tiles(arch: ArchSpec) -> tuple[tuple[int, int], ...]:
    """Register tiles of products of matrices, the preferred first: two vectors of columns and about eight rows, which
    were the fastest of a sweep over tiles, rows and columns at heads of 64 and 128, in fp32 and bf16.
    """
    tiles = dict.fromkeys(tile[:2] for tile in arch.warp_tiles_for("fp32_fp32_fp32", "compv3") if tile[0] > 1)
    vector = arch.vector_bytes // 4
    return tuple(sorted(tiles, key=lambda tile: (abs(tile[1] - 2 * vector), abs(tile[0] - _REGISTER_ROWS))))


def cpu_columns(arch: ArchSpec, columns: int, depth: int, wanted: int) -> int:
    """About ``wanted`` columns of a block: whole register tiles, and whole vectors of groups."""
    unit = math.lcm(columns, depth * arch.vector_bytes // 4)
    return max(round(wanted / unit), 1) * unit


def cpu_tile(config: FmhaConfig, m0: int, n0: int) -> tuple[int, ...]:
    """The tile of a CPU's kernel, whose products are of whole blocks: heads are not cut."""
    q, v = config.hdim
    return (m0, n0, q, m0, v, m0, n0, q, v) if config.family is Family.DQ_DK_DV else (m0, n0, q, v, n0, q)


def elementwise_tile(config: FmhaConfig, arch: ArchSpec) -> tuple[int, ...]:
    """The tile of a kernel without a product: m0 rows at a time."""
    q, v = config.hdim
    if config.family is Family.COMBINE:
        columns = spec_of(arch).combine_columns
        return (32, v, 32, columns, 32, v)
    if config.family is Family.DOT_DO_O:
        return (64, max(v, 128), 32, max(v, 128), 32, max(q, 128))
    return (64, v, 32, v, 32, q) if config.family is Family.APPENDKV else (64, q, 32, q, 32, q)


def elementwise_algorithm(config: FmhaConfig, arch: ArchSpec, team: int = 1) -> Mapping[str, Any]:
    """Pipeline, tile and waves of a kernel without a product; ``team`` is a CPU's."""
    waves = team if arch.kind == "cpu" else 128 // arch.wave_size
    return {
        "pipeline": _PIPELINES[config.family],
        "tile": elementwise_tile(config, arch),
        "wave": (waves, *(1,) * 8),
        "warp_tile": (1,) * 9,
    }


def cpu_algorithm(
    config: FmhaConfig,
    arch: ArchSpec,
    team: int = 1,
    register_tile: tuple[int, int] | None = None,
    rows: int = _CPU_ROWS,
    columns: int = 0,
) -> Mapping[str, Any]:
    """Pipeline, tile, waves and register tile of a CPU's kernel with the signature of ``config``."""
    if config.family in ELEMENTWISE:
        return elementwise_algorithm(config, arch, team)
    mr, nr = register_tile or cpu_register_tiles(arch)[0]
    depth = cpu_depth(config.dtype)
    if not columns:
        few = config.family is Family.DQ_DK_DV or arch.caches.l2_bytes < _LARGE_CACHE
        columns = _FEW_COLUMNS if few else _CPU_COLUMNS
    m0, n0 = max(rows // mr, 1) * mr, cpu_columns(arch, nr, depth, columns)
    return {
        "pipeline": _PIPELINES.get(config.family, "qr"),
        "tile": cpu_tile(config, m0, n0),
        "wave": (team, *(1,) * 8),
        "warp_tile": (mr, nr, depth) * 3,
    }

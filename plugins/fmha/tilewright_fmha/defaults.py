"""Default algorithms: how a kernel of some signature is cut if nobody says, from the arch's own tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tilewright_arch import ArchSpec, AttentionSpec
from tilewright_fmha.config import FmhaConfig, config_of
from tilewright_fmha.words import Family, FmhaDType
from tilewright_kit.dtypes import DType
from tilewright_kit.errors import UnsupportedError

__all__ = [
    "backward_tile",
    "cpu_algorithm",
    "cpu_depth",
    "cpu_register_tiles",
    "default_of",
    "spec_of",
]

_CPU_ROWS, _CPU_COLUMNS = 64, 128
"""Rows of queries and columns of keys of a CPU's block, about."""
_CPU_PIPELINES = {
    Family.COMBINE: "splitkv_combine",
    Family.APPENDKV: "appendkv",
    Family.DQ_DK_DV: "bwd",
    Family.DOT_DO_O: "bwd",
    Family.CONVERT_DQ: "bwd",
}
_PAIRS = (DType.BF16, DType.FP8, DType.BF8)


def spec_of(arch: ArchSpec) -> AttentionSpec:
    """The arch's block of attention. Raises ``UnsupportedError`` if it has none."""
    if arch.attention is None:
        raise UnsupportedError(
            f"{arch.id} has no kernels of attention",
            field="arch",
            value=arch.id,
            rule="arch_known",
            fix="use another device",
        )
    return arch.attention


def default_of(name: str, family: Family = Family.FWD) -> Any:
    """The default of a configuration's field."""
    return next(item.default for item in fields(config_of(family)) if item.name == name)


def cpu_depth(dtype: FmhaDType) -> int:
    """Values of a dot product's step: pairs of bf16, in which all 8-bit floats are exact, or single fp32."""
    return 2 if dtype.q in _PAIRS and dtype.kv in _PAIRS else 1


def cpu_register_tiles(arch: ArchSpec) -> tuple[tuple[int, int], ...]:
    """Register tiles, the preferred first: those of products of matrices that have whole vectors of columns."""
    tiles = arch.warp_tiles_for("fp32_fp32_fp32", "compv3")
    return tuple(dict.fromkeys(tile[:2] for tile in tiles if tile[0] > 1))


def cpu_columns(arch: ArchSpec, columns: int, depth: int, wanted: int) -> int:
    """About ``wanted`` columns of a block: whole register tiles, and whole vectors of groups."""
    unit = math.lcm(columns, depth * arch.vector_bytes // 4)
    return max(round(wanted / unit), 1) * unit


def backward_tile(m0: int, n0: int, hdim: tuple[int, int]) -> tuple[int, ...]:
    """The nine numbers of a CPU's gradients, which are products of whole blocks."""
    q, v = hdim
    return (m0, n0, q, m0, v, m0, n0, q, v)


def cpu_algorithm(
    config: FmhaConfig,
    arch: ArchSpec,
    team: int = 1,
    register_tile: tuple[int, int] | None = None,
    rows: int = _CPU_ROWS,
    columns: int = _CPU_COLUMNS,
) -> Mapping[str, Any]:
    """Pipeline, tile, waves and register tile of a CPU's kernel with the signature of ``config``."""
    mr, nr = register_tile or cpu_register_tiles(arch)[0]
    depth = cpu_depth(config.dtype)
    m0, n0 = max(rows // mr, 1) * mr, cpu_columns(arch, nr, depth, columns)
    q, v = config.hdim
    tile = backward_tile(m0, n0, config.hdim) if config.family is Family.DQ_DK_DV else (m0, n0, q, v, n0, q)
    return {
        "pipeline": _CPU_PIPELINES.get(config.family, "qr"),
        "tile": tile,
        "wave": (team, *(1,) * 8),
        "warp_tile": (mr, nr, depth) * 3,
    }

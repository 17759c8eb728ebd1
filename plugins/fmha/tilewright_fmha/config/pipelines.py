"""Names of pipelines: those of each family, and those whose kernels are cut or launched unlike all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.vocabulary import Family

__all__ = [
    "DIRECT",
    "FEW_ROWS",
    "SPECIALISED",
    "direct_algorithm",
    "direct_bytes",
    "family_pipelines",
    "is_specialised",
    "offers_specialised",
]

SPECIALISED = "ws"
"""Producers and consumers of their own warpgroups."""
FEW_ROWS = "qr_nwarp_sshuffle"
"""Waves share the keys of few rows."""
DIRECT = "v3"
"""AMD GPUs: eight waves in pairs on a SIMD, keys straight to LDS."""
_FORWARD = ("qr_async", "qr", "qs", "qr_async_trload", DIRECT, SPECIALISED)
_PIPELINES: Mapping[Family, tuple[str, ...]] = {
    Family.FWD: _FORWARD,
    Family.SPLITKV: (FEW_ROWS, "qr", SPECIALISED),
    Family.PAGEDKV: ("qr_pagedkv", SPECIALISED),
    Family.BATCH_PREFILL: ("qr_async", "batch_prefill_async", "qr", SPECIALISED),
    Family.COMBINE: ("splitkv_combine",),
    Family.SCORES: ("qr",),
    Family.MERGE: ("splitkv_combine",),
    Family.APPENDKV: ("appendkv",),
    Family.DOT_DO_O: ("bwd",),
    Family.DQ_DK_DV: ("bwd", DIRECT, SPECIALISED),
    Family.CONVERT_DQ: ("bwd",),
}


_DIRECT_COLUMNS: Mapping[tuple[int, int], int] = {(64, 64): 128, (128, 128): 64}
"""Keys of a block, by heads: two blocks of keys and of values fill the LDS of gfx942."""


def direct_algorithm(family: Family, hdim: tuple[int, int]) -> dict[str, Any]:
    """The cut of the pipeline ``DIRECT`` for heads of these sizes; empty if it has none."""
    n0, warp = _DIRECT_COLUMNS.get(hdim), (32, 32, 16)
    if family is Family.DQ_DK_DV and hdim == (128, 128):
        return {
            "tile": (32, 128, 128, 32, 128, 32, 32, 128, 128),
            "wave": (1, 4, 1, 4, 1, 1, 1, 4, 1),
            "warp_tile": warp * 3,
        }
    if n0 is None or family is not Family.FWD:
        return {}
    return {
        "tile": (256, n0, 32, hdim[1], 32, hdim[0]),
        "wave": (8, 1, 1, 8, 1, 1, 1, 1, 1),
        "warp_tile": (*warp, *warp, 16, 16, 16),
    }


def direct_bytes(config: FmhaConfig) -> int:
    """Bytes of LDS: two blocks of keys and of values, where queries lay before; of gradients, queries and dO, both
    twice, dS with 16 bytes more in each line, and what comes with a row, where keys lay before.
    """
    q, v = config.hdim
    if config.family is Family.DQ_DK_DV:
        block = config.m0 * (2 * (q + v) + config.n0) * config.q.bytes + (16 + 8) * config.m0
        return max(block, config.n0 * q * config.q.bytes)
    return max(config.m0 * q, 2 * config.n0 * (q + v)) * config.q.bytes


def is_specialised(config: FmhaConfig) -> bool:
    """True for kernels of the warp-specialised pipeline."""
    return config.pipeline == SPECIALISED


def offers_specialised(arch: ArchSpec) -> bool:
    """True for archs that have the warp-specialised pipeline."""
    spec = attention_of(arch)
    return spec is not None and SPECIALISED in spec.pipelines


def family_pipelines(family: Family, arch: ArchSpec) -> tuple[str, ...]:
    """Pipelines of a family that the arch has, the preferred first; ``qr`` where it has none of the family's own.
    (Batch prefill had one pipeline there. Large heads leave no room for two tiles of keys on their way, so ``qr`` is
    another.)
    """
    spec = attention_of(arch)
    offered = spec.pipelines if spec else ()
    return tuple(name for name in _PIPELINES[family] if name in offered) or ("qr",)

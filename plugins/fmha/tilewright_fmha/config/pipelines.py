"""Names of pipelines: those of each family, and the two whose kernels are cut or launched unlike all others."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.vocabulary import Family

__all__ = ["FEW_ROWS", "SPECIALISED", "family_pipelines", "is_specialised", "offers_specialised"]

SPECIALISED = "ws"
"""Producers and consumers of their own warpgroups."""
FEW_ROWS = "qr_nwarp_sshuffle"
"""Waves share the keys of few rows."""
_FORWARD = ("qr_async", "qr", "qs", "qr_async_trload", "v3", SPECIALISED)
_PIPELINES: Mapping[Family, tuple[str, ...]] = {
    Family.FWD: _FORWARD,
    Family.SPLITKV: (FEW_ROWS, "qr", SPECIALISED),
    Family.PAGEDKV: ("qr_pagedkv", SPECIALISED),
    Family.BATCH_PREFILL: ("qr_async", "batch_prefill_async", "qr", SPECIALISED),
    Family.COMBINE: ("splitkv_combine",),
    Family.SCORES: ("qr",),
    Family.APPENDKV: ("appendkv",),
    Family.DOT_DO_O: ("bwd",),
    Family.DQ_DK_DV: ("bwd", SPECIALISED),
    Family.CONVERT_DQ: ("bwd",),
}


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

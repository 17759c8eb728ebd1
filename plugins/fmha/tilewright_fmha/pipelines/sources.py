"""Headers of templates and the macros that instantiate them."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decodes, splits_tiles
from tilewright_fmha.config.gradients import specialised_gradient
from tilewright_fmha.config.latent import is_latent, latent_by_rows
from tilewright_fmha.vocabulary import Family, QScale, Rope

__all__ = ["HEADERS", "direct_source", "portable_source", "ws_source"]

HEADERS: Mapping[Family, tuple[str, str]] = {
    **dict.fromkeys(
        (Family.FWD, Family.SPLITKV, Family.PAGEDKV, Family.BATCH_PREFILL), ("forward.hpp", "TW_FMHA_FORWARD")
    ),
    Family.COMBINE: ("combine.hpp", "TW_FMHA_COMBINE"),
    Family.SCORES: ("scores.hpp", "TW_FMHA_SCORES"),
    Family.MERGE: ("merge.hpp", "TW_FMHA_MERGE"),
    Family.APPENDKV: ("append.hpp", "TW_FMHA_APPEND"),
    Family.DQ_DK_DV: ("backward/backward.hpp", "TW_FMHA_BACKWARD"),
    Family.DOT_DO_O: ("dot.hpp", "TW_FMHA_DOT_DO_O"),
    Family.CONVERT_DQ: ("convert.hpp", "TW_FMHA_CONVERT_DQ"),
}
"""Header of a family's template, below ``cpu/fmha/``, and the macro that instantiates it. GPUs have headers of the
same names below ``gpu/fmha/``, and macros that end in ``_KERNEL``.
"""


_ROUNDED = ("append_rounded.hpp", "TW_FMHA_APPEND_ROUNDED")


def _rounds(config: FmhaConfig, kind: str) -> bool:
    """True if new rows become 8-bit floats on their way: of another type, or turned, which CPUs do without it."""
    if config.family is not Family.APPENDKV:
        return False
    return config.qscale is not QScale.NONE or (kind != "cpu" and config.kv.bytes == 1 and config.rope is not Rope.NONE)


def portable_source(config: FmhaConfig, kind: str) -> tuple[str, str]:
    """Header and macro of a kernel on the portable blocks of CPUs or of GPUs."""
    header, macro = _ROUNDED if _rounds(config, kind) else HEADERS[config.family]
    if kind == "cpu":
        return f"cpu/fmha/{header}", macro
    return f"gpu/fmha/{header}", "TW_FMHA_KERNEL" if config.is_forward else f"{macro}_KERNEL"


def direct_source(config: FmhaConfig, kind: str) -> tuple[str, str]:  # noqa: ARG001
    """Header and macro of a kernel for the matrix units of gfx942 and gfx950 alone."""
    if config.family is Family.DQ_DK_DV:
        return "gpu/amd/fmha/backward.hpp", "TW_FMHA_BACKWARD_DIRECT_KERNEL"
    return "gpu/amd/fmha/forward.hpp", "TW_FMHA_DIRECT_KERNEL"


def ws_source(config: FmhaConfig, kind: str) -> tuple[str, str]:  # noqa: ARG001
    """Header and macro of a warp-specialised kernel."""
    if latent_by_rows(config):
        return "sm90/latent/latent.hpp", "TW_FMHA_WS_LATENT_ROWS_KERNEL"
    if is_latent(config):
        return "sm90/fmha/latent.hpp", "TW_FMHA_WS_LATENT_KERNEL"
    if decodes(config):
        return "sm90/fmha/decode.hpp", "TW_FMHA_WS_DECODE_KERNEL"
    if splits_tiles(config):
        return "sm90/parts/parts.hpp", "TW_FMHA_WS_PARTS_KERNEL"
    if specialised_gradient(config):
        return "sm90/fmha/backward.hpp", "TW_FMHA_WS_BACKWARD_KERNEL"
    return "sm90/fmha/forward.hpp", "TW_FMHA_WS_KERNEL"

"""Headers of templates and the macros that instantiate them."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decodes
from tilewright_fmha.config.gradients import specialised_gradient
from tilewright_fmha.vocabulary import Family

__all__ = ["HEADERS", "portable_source", "ws_source"]

HEADERS: Mapping[Family, tuple[str, str]] = {
    **dict.fromkeys(
        (Family.FWD, Family.SPLITKV, Family.PAGEDKV, Family.BATCH_PREFILL), ("forward.hpp", "TW_FMHA_FORWARD")
    ),
    Family.COMBINE: ("combine.hpp", "TW_FMHA_COMBINE"),
    Family.APPENDKV: ("append.hpp", "TW_FMHA_APPEND"),
    Family.DQ_DK_DV: ("backward/backward.hpp", "TW_FMHA_BACKWARD"),
    Family.DOT_DO_O: ("dot.hpp", "TW_FMHA_DOT_DO_O"),
    Family.CONVERT_DQ: ("convert.hpp", "TW_FMHA_CONVERT_DQ"),
}
"""Header of a family's template, below ``cpu/fmha/``, and the macro that instantiates it. GPUs have headers of the
same names below ``gpu/fmha/``, and macros that end in ``_KERNEL``.
"""


def portable_source(config: FmhaConfig, kind: str) -> tuple[str, str]:
    """Header and macro of a kernel on the portable blocks of CPUs or of GPUs."""
    header, macro = HEADERS[config.family]
    if kind == "cpu":
        return f"cpu/fmha/{header}", macro
    return f"gpu/fmha/{header}", "TW_FMHA_KERNEL" if config.is_forward else f"{macro}_KERNEL"


def ws_source(config: FmhaConfig, kind: str) -> tuple[str, str]:  # noqa: ARG001
    """Header and macro of a warp-specialised kernel."""
    if decodes(config):
        return "sm90/fmha/decode.hpp", "TW_FMHA_WS_DECODE_KERNEL"
    if specialised_gradient(config):
        return "sm90/fmha/backward.hpp", "TW_FMHA_WS_BACKWARD_KERNEL"
    return "sm90/fmha/forward.hpp", "TW_FMHA_WS_KERNEL"

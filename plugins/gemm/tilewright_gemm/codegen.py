"""From a configuration to its translation unit: a template file with the configuration's constants filled in."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from string import Template

from tilewright_arch import ArchSpec
from tilewright_gemm import __version__
from tilewright_gemm.config import GemmConfig
from tilewright_gemm.pack_b import PackBConfig
from tilewright_gemm.rules import RULES
from tilewright_kit.errors import UnsupportedError
from tilewright_kit.naming import digest_of
from tilewright_kit.source import SourceUnit

__all__ = ["EXPORTS", "exports_of", "generate", "render", "symbol_of"]

EXPORTS: dict[str, tuple[str, ...]] = {
    "TW_GEMM_MAIN": ("main",),
    "TW_GEMM_SPLIT": ("main", "partial", "reduce"),
    "TW_GEMM_PACK_B": ("pack_b",),
    "TW_GEMM_WORKSPACE": ("workspace",),
}
"""Macros of ``tilewright/cpu/gemm.hpp`` and the roles that each exports: the product; its slices and their sum
(split-K); packing of B; and ``int64_t(const tw_gemm_args*)``, the workspace in bytes. A unit has those that its kernel
is used for: the compiler's time goes into what is exported.
"""

_TEMPLATES = {"cpu": ("cpu_gemm.cpp.in", "c++")}


def generate(config: GemmConfig, arch: ArchSpec) -> SourceUnit:
    """The translation unit of a valid configuration.

    Raises ``ConfigInvalidError``, or ``UnsupportedError`` for an arch whose kind has no template yet.
    """
    RULES.require(config, arch)
    if arch.kind not in _TEMPLATES:
        raise UnsupportedError(
            f"there is no GEMM template for {arch.kind} devices yet, so {config.name} cannot be built for {arch.id}",
            field="arch",
            value=arch.id,
            rule="template",
            fix=f"use a device of kind {', '.join(_TEMPLATES)}",
        )
    return render(config, arch.kind)


def render(config: GemmConfig, kind: str) -> SourceUnit:
    """The unit of any configuration for a kind of device that has a template, valid or not.

    ``generate`` checks first.
    """
    file, language = _TEMPLATES[kind]
    symbol, macros = symbol_of(config), exports_of(config)
    exports = "\n".join(f"{name}({symbol}, Config)" for name in macros)
    return SourceUnit(
        name=config.name,
        language=language,
        text=_template(file).substitute(_constants(config), exports=exports),
        entries={role: symbol if role == "main" else f"{symbol}_{role}" for name in macros for role in EXPORTS[name]},
        plugin_version=__version__,
    )


def exports_of(config: GemmConfig) -> tuple[str, ...]:
    """The macros that a kernel's unit ends with."""
    if isinstance(config, PackBConfig):
        return ("TW_GEMM_PACK_B",)
    return ("TW_GEMM_SPLIT" if config.split_k > 1 else "TW_GEMM_MAIN", "TW_GEMM_WORKSPACE")


def symbol_of(config: GemmConfig) -> str:
    """The exported symbol: the kernel's name as a C identifier, made unique by a digest of all fields."""
    return re.sub(r"\W", "_", config.name) + "_" + digest_of(config.to_dict())[:12]


def _constants(config: GemmConfig) -> dict[str, str]:
    """Every name in the template. ``record`` states all fields, so that no two configurations share a unit."""
    values: dict[str, object] = {
        "name": config.name,
        "record": json.dumps(config.to_dict(), sort_keys=True),
        "a": config.a,
        "b": config.b,
        "c": config.c,
        "bias": f"tw::{config.bias}" if config.bias else "void",
        "d": ", ".join(f"tw::{item}" for item in config.d),
        "a_col": config.layout[0] == "c",
        "b_col": config.layout[1] == "c",
        "wave_m": config.wave[0],
        "wave_n": config.wave[1],
    }
    for letter, size, warp in zip("mnk", config.tile, config.warp_tile, strict=True):
        values |= {f"tile_{letter}": size, f"warp_tile_{letter}": warp}
    for field in (
        "pipeline", "scheduler", "persistent", "pad_m", "pad_n", "pad_k", "preshuffle",
        "scale_a", "scale_b", "binary", "unary",
    ):  # fmt: skip
        values[field] = getattr(config, field)
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}


@cache
def _template(file: str) -> Template:
    return Template((resources.files(__package__) / "templates" / file).read_text("utf-8"))

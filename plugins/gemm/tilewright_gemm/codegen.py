"""Translation units of configurations: a template file with the configuration's constants filled in."""

from __future__ import annotations

import json
from functools import partial

from tilewright_arch import ArchSpec
from tilewright_gemm import __version__
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.int4 import INT4_RING, scale_struct
from tilewright_gemm.config.narrow import narrow_a, narrow_b
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.pipelines.records import pipeline_of
from tilewright_gemm.pipelines.rulebook import RULES
from tilewright_gemm.vocabulary import Epilogue, ScaleA, ScaleB
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.contract.templates import symbol_of, template, texts
from tilewright_kit.tiles.footprint.workgroup import stages_of
from tilewright_kit.types.errors import UnsupportedError

__all__ = [
    "EXPORTS",
    "config_struct",
    "exports_of",
    "generate",
    "kernel_header",
    "kernel_type",
    "render",
    "render_gpu",
    "symbol_of",
]

EXPORTS: dict[str, tuple[str, ...]] = {
    "TW_GEMM_MAIN": ("main",),
    "TW_GEMM_SPLIT": ("main", "partial", "reduce"),
    "TW_GEMM_PACK_B": ("pack_b",),
    "TW_GEMM_WORKSPACE": ("workspace",),
}
"""Macros of ``tilewright/cpu/gemm/gemm.hpp`` and the roles that each exports: the product; its slices and their sum
(split-K); packing of B; and ``int64_t(const tw_gemm_args*)``, the workspace in bytes. A unit has those that its kernel
is used for: the compiler's time goes into what is exported. A kernel of a GPU has one role, ``main`` (it finishes
split-K and Stream-K by itself) or ``pack_b``.
"""

_CPU = "cpu_gemm.cpp.in"
_GPU_CONFIG = "gpu_config.in"
_PACKING = "gpu_pack_b.hip.in"
_template = partial(template, __package__)


def generate(config: GemmConfig, arch: ArchSpec) -> SourceUnit:
    """The translation unit of a valid configuration.

    Raises ``ConfigInvalidError``, or ``UnsupportedError`` for an arch whose kind has no template yet.
    """
    RULES.require(config, arch)
    if arch.kind == "cpu":
        return render(config)
    if isinstance(config, PackBConfig) and arch.kind != "hip":
        raise _no_template(config, arch)
    return render_gpu(config, arch)


def _no_template(config: GemmConfig, arch: ArchSpec) -> UnsupportedError:
    return UnsupportedError(
        f"there is no template of {config.operation} for pipeline {config.pipeline} of {arch.kind} devices, so "
        f"{config.name} cannot be built for {arch.id}",
        field="arch",
        value=arch.id,
        rule="template",
        fix="use a device of another kind: cpu or hip" if isinstance(config, PackBConfig) else "use another pipeline",
    )


def render(config: GemmConfig) -> SourceUnit:
    """The unit of any configuration for CPUs, valid or not. ``generate`` checks first."""
    symbol, macros = symbol_of(config), exports_of(config)
    exports = "\n".join(f"{name}({symbol}, {kernel_type(config)})" for name in macros)
    entries = {role: symbol if role == "main" else f"{symbol}_{role}" for name in macros for role in EXPORTS[name]}
    text = _template(_CPU).substitute(_constants(config), exports=exports)
    return SourceUnit(config.name, "c++", text, entries, plugin_version=__version__)


def render_gpu(config: GemmConfig, arch: ArchSpec) -> SourceUnit:
    """The unit of any configuration whose pipeline a GPU has, valid or not. ``generate`` checks first."""
    symbol, constants = symbol_of(config), _gpu_constants(config, arch)
    packs, record = isinstance(config, PackBConfig), pipeline_of(config, arch)
    if record is None:
        raise _no_template(config, arch)
    file = _PACKING if packs else record.template
    fields = {name: constants[name] for name in ("name", "record", "header")}
    struct = config_struct(config, arch)
    text = _template(file).substitute(fields, config=struct, symbol=symbol, kernel=kernel_type(config))
    return SourceUnit(config.name, arch.kind, text, {"pack_b" if packs else "main": symbol}, plugin_version=__version__)


def config_struct(config: GemmConfig, arch: ArchSpec) -> str:
    """The struct ``Config`` of C++ that states a configuration to the templates of GPUs; those of CPUs take it too."""
    return _template(_GPU_CONFIG).substitute(_gpu_constants(config, arch)).rstrip("\n")


def kernel_header(config: GemmConfig) -> str:
    """The header that has a kernel's main loop, in the folder ``gemm`` of its kind of device."""
    if config.int4:
        return "int4_ring" if config.pipeline == INT4_RING else "int4"
    if config.narrow:
        return "narrow"
    return "scaled" if config.block_scaled else "gemm"


def kernel_type(config: GemmConfig) -> str:
    """The configuration that a kernel is made of, of the struct ``Config`` of its unit."""
    if config.int4:
        return scale_struct(config.scale_b, "Config")
    if config.narrow:
        forms = (narrow_a(config.scale_a), config.a), (narrow_b(config.scale_b), config.b)
        a, b = (f"tw::{form.name if form else dtype}" for form, dtype in forms)
        return f"tw::Stored<{a}>::And<{b}>::Of<Config>"
    return f"tw::Scaled{config.scale_b}<Config>" if config.block_scaled else "Config"


def exports_of(config: GemmConfig) -> tuple[str, ...]:
    """The macros that a CPU kernel's unit ends with."""
    if isinstance(config, PackBConfig):
        return ("TW_GEMM_PACK_B",)
    return ("TW_GEMM_SPLIT" if config.split_k > 1 else "TW_GEMM_MAIN", "TW_GEMM_WORKSPACE")


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
        "header": kernel_header(config),
    }
    for letter, size, wave, warp in zip("mnk", config.tile, config.wave, config.warp_tile, strict=True):
        values |= {f"tile_{letter}": size, f"wave_{letter}": wave, f"warp_tile_{letter}": warp}
    for field in (
        "pipeline", "scheduler", "persistent", "pad_m", "pad_n", "pad_k", "preshuffle",
        "scale_a", "scale_b", "binary", "unary",
    ):  # fmt: skip
        values[field] = getattr(config, field)
    if config.block_scaled:  # the epilogue scales nothing
        values |= {"scale_a": ScaleA.NONE, "scale_b": ScaleB.NONE}
    if config.int4:  # the epilogue scales rows at most
        values |= {"scale_b": ScaleB.NONE}
    return texts(values)


def _gpu_constants(config: GemmConfig, arch: ArchSpec) -> dict[str, str]:
    values: dict[str, object] = {
        # The word is a keyword of C++.
        "epilogue": "default_" if config.epilogue is Epilogue.DEFAULT else config.epilogue,
        "scheduler": "default_" if config.scheduler == "default" else config.scheduler,
        "stages": stages_of(config, arch),
        "double_buffer": arch.pipeline(config.pipeline).double_buffer,
    }
    values |= {f"cluster_{letter}": size for letter, size in zip("mnk", config.cluster, strict=True)}
    for field in ("grouped", "batched", "transpose_c", "split_k", "promote", "num_wave_groups", "reduction"):
        values[field] = getattr(config, field)
    return _constants(config) | texts(values)

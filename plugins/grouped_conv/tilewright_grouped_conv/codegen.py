"""From a configuration to its translation unit: a template file with the configuration's constants filled in."""

from __future__ import annotations

import json
from functools import partial

from tilewright_arch import ArchSpec
from tilewright_grouped_conv import __version__
from tilewright_grouped_conv.config.config import ConvConfig, Triple
from tilewright_grouped_conv.config.pipelines import form_of, template_of
from tilewright_grouped_conv.footprint.amd_loads import shares_pixels, turns_weights
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_grouped_conv.vocabulary import Direction, Kind, Scale
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.contract.templates import symbol_of, template, texts
from tilewright_kit.tiles.footprint.workgroup import stages_of
from tilewright_kit.types.vocabulary import Epilogue

__all__ = [
    "EXPORTS",
    "GPU_EXPORTS",
    "exports_of",
    "generate",
    "gpu_exports_of",
    "header_of",
    "render",
    "render_gpu",
    "symbol_of",
]

EXPORTS: dict[str, tuple[str, ...]] = {
    "TW_CONV_MAIN": ("main",),
    "TW_CONV_SPLIT": ("main", "partial", "reduce"),
    "TW_CONV_WORKSPACE": ("workspace",),
}
"""Macros of the headers for CPUs and the roles that each exports: the whole computation; its slices and their sum
(split-K); and ``int64_t(const tw_conv_args*)``, the workspace in bytes.
"""

GPU_EXPORTS = {"TW_CONV_KERNEL": "main", "TW_CONV_CONVERT": "convert"}
"""Macros of the headers for GPUs: the kernel, which finishes split-K by itself; and, of two stages, the second, which
adds and converts partial sums.
"""

_template = partial(template, __package__)
_DIRECTIONS = {
    Direction.FORWARD: "forward",
    Direction.BACKWARD_DATA: "backward_data",
    Direction.BACKWARD_WEIGHT: "backward_weight",
}


def generate(config: ConvConfig, arch: ArchSpec) -> SourceUnit:
    """The translation unit of a valid configuration. Raises ``ConfigInvalidError``."""
    RULES.require(config, arch)
    return render(config) if arch.kind == "cpu" else render_gpu(config, arch)


def render(config: ConvConfig) -> SourceUnit:
    """The unit of any configuration for CPUs, valid or not. ``generate`` checks first."""
    symbol, macros = symbol_of(config), exports_of(config)
    exports = "\n".join(f"{name}({symbol}, Config)" for name in macros)
    entries = {role: symbol if role == "main" else f"{symbol}_{role}" for name in macros for role in EXPORTS[name]}
    text = _unit(template_of(config.pipeline, "cpu"), config, header_of(config), "", exports)
    return SourceUnit(config.name, "c++", text, entries, plugin_version=__version__)


def render_gpu(config: ConvConfig, arch: ArchSpec) -> SourceUnit:
    """The unit of any configuration whose pipeline a GPU has, valid or not. ``generate`` checks first."""
    symbol, macros = symbol_of(config), gpu_exports_of(config)
    entries = {GPU_EXPORTS[name]: symbol if name == "TW_CONV_KERNEL" else f"{symbol}_convert" for name in macros}
    exports = "\n".join(f"{name}({entries[GPU_EXPORTS[name]]}, Config)" for name in macros)
    more = "\n" + _template("conv_gpu_config.in").substitute(_gpu_constants(config, arch)).strip("\n")
    text = _unit(template_of(config.pipeline, arch.kind), config, header_of(config, arch), more, exports)
    return SourceUnit(config.name, arch.kind, text, entries, plugin_version=__version__)


def gpu_exports_of(config: ConvConfig) -> tuple[str, ...]:
    """The macros that a GPU kernel's unit ends with. The weights' gradient of kernels without a product always goes
    through the workspace.
    """
    weights = config.direction is Direction.BACKWARD_WEIGHT
    two = config.two_stage or (weights and not config.is_matrix)
    return ("TW_CONV_KERNEL", "TW_CONV_CONVERT") if two else ("TW_CONV_KERNEL",)


def exports_of(config: ConvConfig) -> tuple[str, ...]:
    """The macros that a CPU kernel's unit ends with."""
    return ("TW_CONV_SPLIT" if config.split_k > 1 else "TW_CONV_MAIN", "TW_CONV_WORKSPACE")


def header_of(config: ConvConfig, arch: ArchSpec | None = None) -> str:
    """The header of a kernel's templates, on CPUs and GPUs alike but for those that some archs have alone. A unit
    includes one, so that its compiler reads no other kind of kernel.
    """
    if arch is not None and turns_weights(config, arch):
        return "turned_taps.hpp"
    if arch is not None and shares_pixels(config, arch):
        return "shared_pixels.hpp"
    if header := form_of(config.pipeline).header:
        return header
    if config.direction is Direction.BACKWARD_WEIGHT and not config.is_matrix:
        return "direct/weight.hpp"
    if config.kind is Kind.DEPTHWISE:
        return "depthwise/depthwise.hpp"
    if config.kind is Kind.DIRECT:
        return "direct/conv.hpp"
    return "weight.hpp" if config.direction is Direction.BACKWARD_WEIGHT else "implicit_gemm.hpp"


def _unit(file: str, config: ConvConfig, header: str, more: str, exports: str) -> str:
    """``record`` states all fields, so that no two configurations share a unit."""
    struct = _template("conv_config.in").substitute(_constants(config), more=more).rstrip("\n")
    record = json.dumps(config.to_dict(), sort_keys=True)
    return _template(file).substitute(name=config.name, record=record, header=header, config=struct, exports=exports)


def _constants(config: ConvConfig) -> dict[str, str]:
    """Every name in ``conv_config.in``."""
    letters, scaled = config.letters, config.scale is Scale.CHANNEL
    values: dict[str, object] = {
        "a": config.a,
        "b": config.b,
        "c": config.c,
        "bias": f"tw::{config.bias}" if config.bias else "void",
        "d": ", ".join(f"tw::{item}" for item in config.d),
        "a_col": letters[0] == "c",
        "b_col": letters[1] == "c",
        "grouped": config.mapped_rows and config.direction is Direction.BACKWARD_DATA,
        # The word is a keyword of C++.
        "scheduler": "default_" if config.scheduler == "default" else config.scheduler,
        # Channels of the result are columns, or with channels first rows. One scale for all is B's in either case.
        "scale_a": "row" if scaled and config.channels_first else "none",
        "scale_b": "column" if scaled and not config.channels_first else "none" if scaled else config.scale,
        "direction": _DIRECTIONS[config.direction],
        "kind": config.kind,
        "pipeline": form_of(config.pipeline).written or config.pipeline,
        "persistent": form_of(config.pipeline).persistent,
        "linear_rows": not config.mapped_rows,
        "pixel_tile": _list(config.pixel_tile),
        "filter": _list(config.fixed_filter),
        "stride": _list(config.fixed_stride),
        "dilation": _list(config.dilation),
    }
    for letter, size, wave, warp in zip("mnk", config.tile, config.wave, config.warp_tile, strict=True):
        values |= {f"tile_{letter}": size, f"wave_{letter}": wave, f"warp_tile_{letter}": warp}
    for field in (
        "pad_m", "pad_n", "pad_k", "split_k", "binary", "unary", "ndim", "channels_first", "accumulate",
        "unpadded", "channel_tile",
    ):  # fmt: skip
        values[field] = getattr(config, field)
    return texts(values)


def _gpu_constants(config: ConvConfig, arch: ArchSpec) -> dict[str, str]:
    """Every name in ``conv_gpu_config.in``."""
    offer = arch.pipelines.get(config.pipeline)  # none without a product
    values: dict[str, object] = {
        "epilogue": "default_" if config.epilogue is Epilogue.DEFAULT else config.epilogue,
        "stages": stages_of(config, arch) if offer else 0,
        "double_buffer": offer.double_buffer if offer else False,
        "groups_merged": config.num_groups_to_merge,
        "blocks_per_unit": config.block_per_cu,
    }
    values |= {f"vector_{letter}": size for letter, size in zip("abc", config.vector_sizes, strict=True)}
    for field in ("two_stage", "num_wave_groups"):
        values[field] = getattr(config, field)
    return texts(values)


def _list(sizes: Triple) -> str:
    return ", ".join(map(str, sizes))

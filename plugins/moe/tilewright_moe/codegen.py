"""Translation units of configurations."""

from __future__ import annotations

import json
from functools import partial

from tilewright_arch import ArchSpec
from tilewright_gemm.fusion import config_struct, kernel_header, kernel_type
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.contract.templates import symbol_of, template
from tilewright_kit.tiles.footprint.workgroup import is_specialised
from tilewright_moe import __version__
from tilewright_moe.config import RULES, MoeConfig

__all__ = ["generate"]

_template = partial(template, __package__)


def generate(config: MoeConfig, arch: ArchSpec) -> SourceUnit:
    """The translation unit of a valid configuration. Raises ``ConfigInvalidError``."""
    RULES.require(config, arch)
    symbol = symbol_of(config)
    file = "cpu_moe.cpp.in" if arch.kind == "cpu" else "gpu_moe.cu.in"
    if is_specialised(config, arch):
        file = "sm90_moe.cu.in"
    text = _template(file).substitute(
        name=config.name,
        record=json.dumps(config.to_dict(), sort_keys=True),
        header=kernel_header(config),
        config=config_struct(config, arch),
        kernel=kernel_type(config) + _results(config),
        symbol=symbol,
    )
    language = "c++" if arch.kind == "cpu" else arch.kind
    return SourceUnit(config.name, language, text, {"main": symbol}, plugin_version=__version__)


def _results(config: MoeConfig) -> str:
    """The steps behind the sums, as a second parameter of the kernel."""
    return f", tw::MoeResults<{'true' if config.gated else 'false'}, tw::{config.result}>" if config.fused else ""

"""Kernels of the strided copy: one for each pair of element types, on every kind of device."""

# ruff: noqa: RUF009  (part and suffix make fields; they hold no state)
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tilewright_arch import ArchSpec
from tilewright_grouped_conv import __version__
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import part, suffix
from tilewright_kit.config.rules import RuleBook, Violation
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.contract.templates import symbol_of, template
from tilewright_kit.kernel_sets.declare import KernelSet, declare
from tilewright_kit.types.dtypes import DType

__all__ = ["CONVERTED", "TRANSFORM_RULES", "TRANSFORM_SETS", "TransformConfig", "generate_transform"]

CONVERTED = (DType.FP32, DType.FP16, DType.BF16)
"""Types that a copy converts into each other; all others it only moves."""
_CPU, _GPU = "transform_cpu.cpp.in", "transform_gpu.cu.in"


@dataclass(frozen=True)
class TransformConfig(KernelConfig):
    """A strided copy with conversion."""

    operation: ClassVar[str] = "conv_transform"
    signature_fields: ClassVar[tuple[str, ...]] = ("dtype_in", "dtype_out")

    dtype_in: DType = part(DType.FP32)
    dtype_out: str = suffix("to", "")
    """Empty: as ``dtype_in``."""

    def __post_init__(self) -> None:
        if self.dtype_out == self.dtype_in.value:
            object.__setattr__(self, "dtype_out", "")

    @property
    def to(self) -> str:
        """Element type of the copy, by name."""
        return self.dtype_out or self.dtype_in.value


def dtype_pair(config: TransformConfig, _: ArchSpec) -> Iterator[Violation]:
    """Only floats of 16 bits and more are converted."""
    names = [dtype.value for dtype in CONVERTED]
    if config.to != config.dtype_in.value and not (config.dtype_in in CONVERTED and config.to in names):
        reason = f"a copy does not convert {config.dtype_in} to {config.to}"
        yield Violation("dtype_pair", "dtype_out", config.dtype_out, reason, {"dtype_out": ""})


TRANSFORM_RULES: RuleBook[TransformConfig] = RuleBook((dtype_pair,))

TRANSFORM_SETS: dict[str, KernelSet[TransformConfig]] = {
    "default": KernelSet(
        "default",
        "A copy of every element type, and every conversion between floats of 16 bits and more",
        (
            declare(TransformConfig, dtype_in=list(DType)),
            declare(TransformConfig, dtype_in=list(CONVERTED), dtype_out=[dtype.value for dtype in CONVERTED]),
        ),
    )
}


def generate_transform(config: TransformConfig, arch: ArchSpec) -> SourceUnit:
    """The translation unit of a valid configuration. Raises ``ConfigInvalidError``."""
    TRANSFORM_RULES.require(config, arch)
    symbol, on_cpu = symbol_of(config), arch.kind == "cpu"
    text = template("tilewright_grouped_conv", _CPU if on_cpu else _GPU).substitute(
        name=config.name,
        record=json.dumps(config.to_dict(), sort_keys=True),
        dtype_in=config.dtype_in,
        dtype_out=config.to,
        symbol=symbol,
    )
    language = "c++" if on_cpu else arch.kind
    return SourceUnit(config.name, language, text, {"main": symbol}, plugin_version=__version__)

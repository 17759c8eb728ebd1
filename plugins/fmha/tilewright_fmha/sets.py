"""Kernel sets of the three operations: what is worth having on every arch."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_fmha.config import CONFIGS, FmhaConfig
from tilewright_fmha.words import ATTENTION, FmhaDType
from tilewright_kit.declare import Declaration, KernelSet, declare

__all__ = ["KERNEL_SETS"]

_CPUS = ("x86*", "aarch64*")


def _sets(config: type[FmhaConfig]) -> dict[str, KernelSet[FmhaConfig]]:
    tile = (64, 128, 64, 64, 128, 64) if config.operation == ATTENTION else config().tile
    plain: Declaration[FmhaConfig] = declare(
        config,
        dtype=FmhaDType.FP32,
        hdim=(64, 64),
        pipeline="qr",
        tile=tile,
        wave=(1,) * 9,
        warp_tile=(8, 32, 1) * 3,
    ).on(*_CPUS)
    return {"default": KernelSet("default", "What candidates come from", (plain,))}


KERNEL_SETS: Mapping[str, Mapping[str, KernelSet[FmhaConfig]]] = {
    operation: _sets(config) for operation, config in CONFIGS.items()
}

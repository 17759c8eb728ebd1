"""Kernel sets of GEMM, put together from the declarations of all pipelines."""

from __future__ import annotations

import dataclasses

from tilewright_gemm.config.choices import offered
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.kernel_sets.cpu import CPU_PACKING
from tilewright_gemm.kernel_sets.hip import ESSENTIAL, packing_kernels, preferred
from tilewright_gemm.kernel_sets.preselected import preselected_kernels
from tilewright_gemm.kernel_sets.sweeps import SWEEPS
from tilewright_gemm.pipelines.records import PIPELINES
from tilewright_kit.kernel_sets.declare import Declaration, KernelSet, declare

__all__ = ["KERNEL_SETS", "PACK_B_SETS", "SPACES", "fixed"]


def fixed(config: GemmConfig) -> Declaration[GemmConfig]:
    """A declaration of exactly this configuration."""
    changed = {
        item.name: getattr(config, item.name)
        for item in dataclasses.fields(config)
        if getattr(config, item.name) != item.default
    }
    return declare(GemmConfig, **changed)


DEFAULT = KernelSet(
    "default",
    "The preferred algorithms of the arch for every element type and layout, and an example of each variant",
    tuple(declaration.where(record.drives) for record in PIPELINES for declaration in record.declarations),
    preferred,
)

SPACES: dict[str, KernelSet[GemmConfig]] = {
    kernels.name: dataclasses.replace(
        kernels, declarations=tuple(declaration.where(record.drives) for declaration in kernels)
    )
    for record in PIPELINES
    for kernels in record.spaces
} | {kernels.name: kernels for kernels in SWEEPS.values()}
"""Sets for tuning, by name: too large to be looked through for anything else."""

PACK = KernelSet(
    "default",
    "Packing of B into every preferred format of the arch",
    (CPU_PACKING, *packing_kernels()),
    preferred,
)

KERNEL_SETS: dict[str, KernelSet[GemmConfig]] = {"default": DEFAULT, "essential": ESSENTIAL} | {
    name: KernelSet(name, f"Preselected: {name}, mended", tuple(map(fixed, configs)), offered)
    for name, configs in preselected_kernels()
}
PACK_B_SETS: dict[str, KernelSet[PackBConfig]] = {"default": PACK}

"""Kernel sets of GEMM, put together from the declarations of all pipelines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial

from tilewright_gemm.config.choices import offered
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.kernel_sets.block_scaled import BLOCK_SCALED
from tilewright_gemm.kernel_sets.cpu import CPU_PACKING
from tilewright_gemm.kernel_sets.hip import ESSENTIAL, packing_kernels, preferred
from tilewright_gemm.kernel_sets.int4 import INT4_SET
from tilewright_gemm.kernel_sets.preselected import ORIGINALS, preselected_kernels
from tilewright_gemm.kernel_sets.sweeps import SWEEPS
from tilewright_gemm.pipelines.record import Pipeline
from tilewright_gemm.pipelines.records import PIPELINES
from tilewright_kit.kernel_sets.declare import Declaration, DeferredDeclarations, KernelSet, declare

__all__ = ["KERNEL_SETS", "PACK_B_SETS", "SPACES", "fixed"]


def fixed(config: GemmConfig) -> Declaration[GemmConfig]:
    """A declaration of exactly this configuration."""
    changed = {
        item.name: getattr(config, item.name)
        for item in dataclasses.fields(config)
        if getattr(config, item.name) != item.default
    }
    return declare(GemmConfig, **changed)


def _defaults() -> Iterator[Declaration[GemmConfig]]:
    for record in PIPELINES:
        yield from _driven(record, record.declarations)


def _driven(record: Pipeline, declarations: Iterable[Declaration[GemmConfig]]) -> Iterator[Declaration[GemmConfig]]:
    """Declarations for archs that have the pipeline."""
    return (declaration.where(record.drives) for declaration in declarations)


def _preselected(name: str) -> Iterator[Declaration[GemmConfig]]:
    return map(fixed, preselected_kernels(name))


DEFAULT = KernelSet(
    "default",
    "The preferred algorithms of the arch for every element type and layout, and an example of each variant",
    DeferredDeclarations(_defaults),
    preferred,
)

SPACES: dict[str, KernelSet[GemmConfig]] = {
    kernels.name: dataclasses.replace(
        kernels, declarations=DeferredDeclarations(partial(_driven, record, kernels.declarations))
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

KERNEL_SETS: dict[str, KernelSet[GemmConfig]] = {
    "default": DEFAULT,
    "essential": ESSENTIAL,
    BLOCK_SCALED.name: BLOCK_SCALED,
    INT4_SET.name: INT4_SET,
} | {
    name: KernelSet(name, f"Preselected: {name}, mended", DeferredDeclarations(partial(_preselected, name)), offered)
    for name in ORIGINALS
}
PACK_B_SETS: dict[str, KernelSet[PackBConfig]] = {"default": PACK}

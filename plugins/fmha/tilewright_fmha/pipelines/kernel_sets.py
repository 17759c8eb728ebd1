"""Kernel sets of the three operations: what is worth having on every arch, and the receipts.

``default``: examples of everything that candidates come from, some dozens for an arch. ``essential``: what is
built and checked for every GPU. ``tiny``: one kernel. ``tests``: a few of each kind. ``full``: every type, size of
heads and cut. Each receipt is a set of its own, of usual heads in the preferred
cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from tilewright_fmha.config.config import CONFIGS, FmhaConfig
from tilewright_fmha.kernel_sets.declarations import (
    CUT,
    default_kernels,
    full_kernels,
    receipt_kernels,
    tests_kernels,
    tiny_kernel,
)
from tilewright_fmha.kernel_sets.profiles import PROFILES
from tilewright_fmha.pipelines.choices import first_offered, offered
from tilewright_fmha.pipelines.records import PIPELINES
from tilewright_kit.kernel_sets.declare import Declaration, DeferredDeclarations, KernelSet

__all__ = ["KERNEL_SETS", "SET_NAMES"]

SET_NAMES = ("default", "essential", "tiny", "tests", "full")


def _specialised() -> Iterator[Declaration[FmhaConfig]]:
    for record in PIPELINES:
        for declaration in record.declarations:
            yield declaration.where(record.drives)


def _sets(config: type[FmhaConfig]) -> dict[str, KernelSet[FmhaConfig]]:
    made: dict[str, tuple[str, Callable[[], Iterable[Declaration[FmhaConfig]]]]] = {
        "default": (
            "Kernels that candidates come from, with every feature",
            lambda: default_kernels(config, more=_specialised()),
        ),
        "essential": ("GPUs: every feature in the usual cut", lambda: default_kernels(config, few=True)),
        "tiny": ("One kernel", lambda: (tiny_kernel(config),)),
        "tests": ("A few kernels of each kind", lambda: tests_kernels(config)),
        "full": ("Every type, size of heads and cut", lambda: full_kernels(config)),
    }
    for name, receipt in PROFILES.items():
        if next(iter(receipt_kernels(config, receipt)), None):
            text = f"Receipt {receipt.number}: usual heads in the preferred cut"
            made[name] = (text, partial(receipt_kernels, config, receipt))
    whole = ("full",)
    return {
        name: KernelSet(name, text, DeferredDeclarations(make), offered if name in whole else first_offered_shapes)
        for name, (text, make) in made.items()
    }


def first_offered_shapes(field: str, arch: Any, partial: Mapping[str, Any]) -> Any:
    """The preferred cut; of all other fields everything."""
    choose = first_offered if field in CUT else offered
    return choose(field, arch, partial)


KERNEL_SETS: Mapping[str, Mapping[str, KernelSet[FmhaConfig]]] = {
    operation: _sets(config) for operation, config in CONFIGS.items()
}

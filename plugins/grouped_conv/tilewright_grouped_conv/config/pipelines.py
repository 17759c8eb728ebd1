"""Pipelines of convolution, one record for each template: their names, and the archs that have them.

An arch has a pipeline of products by naming it in its spec, with an instruction that the template issues; ``direct``
and ``bulk`` are names of this operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import BULK_PIPELINE, DIRECT_PIPELINE, IM2COL_PIPELINE

__all__ = ["BULK", "IM2COL", "LOOPS", "PRODUCTS", "Pipeline", "offered_pipelines", "template_of"]


@dataclass(frozen=True)
class Pipeline:
    """Pipelines that share a template."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    """Kinds of device."""
    template: str
    """File in ``templates/``."""
    instructions: frozenset[str] = frozenset()
    """Instructions of arch specs that the template issues; empty: those of every spec of these kinds."""
    bulk_copy: bool = False
    """Tensors are moved by a copy engine, which the arch must have."""

    def has(self, name: str, arch: ArchSpec) -> bool:
        """True if ``name`` is one of its pipelines, and the arch has what the template needs."""
        if arch.kind not in self.kinds or name not in self.names or (self.bulk_copy and arch.bulk_copy is None):
            return False
        if name in (DIRECT_PIPELINE, BULK_PIPELINE):
            return True
        offered = arch.pipeline(name).instructions if name in arch.pipelines else ()
        return bool(offered) and (not self.instructions or not self.instructions.isdisjoint(offered))

    def drives(self, arch: ArchSpec) -> bool:
        """True if the arch has one of its pipelines."""
        return any(self.has(name, arch) for name in self.names)


IM2COL = Pipeline((IM2COL_PIPELINE,), ("cuda",), "conv_sm90.cu.in", frozenset({"wgmma"}), bulk_copy=True)
PRODUCTS = (
    Pipeline(("compv3",), ("cpu",), "conv_cpu.cpp.in"),
    Pipeline(("mem", "compv3", "compv4"), ("hip",), "conv_gpu.cu.in"),
    Pipeline(("compv3", "compv4"), ("cuda",), "conv_gpu.cu.in", frozenset({"simt", "mma"})),
    IM2COL,
)
"""Implicit and pointwise products, the preferred pipeline first."""
BULK = Pipeline((BULK_PIPELINE,), ("cuda",), "conv_gpu.cu.in", bulk_copy=True)
LOOPS = (
    Pipeline((DIRECT_PIPELINE,), ("cpu",), "conv_cpu.cpp.in"),
    Pipeline((DIRECT_PIPELINE,), ("cuda", "hip"), "conv_gpu.cu.in"),
    BULK,
)
"""Kernels without a product."""


def offered_pipelines(arch: ArchSpec) -> tuple[str, ...]:
    """Pipelines of the arch's spec that convolution has templates for."""
    return tuple(name for record in PRODUCTS for name in record.names if record.has(name, arch))


def template_of(name: str, kind: str) -> str:
    """The template of a pipeline on a kind of device; of an unknown one the template of most kernels of that kind."""
    records = [record for record in (*PRODUCTS, *LOOPS) if kind in record.kinds]
    return next((record.template for record in records if name in record.names), records[0].template)

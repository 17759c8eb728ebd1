"""Forms of pipelines, one for each template: their names, the archs that have them, and what their kernels ask of
configurations and tensors. ``pipelines.records`` adds what is computed with them.

An arch has a pipeline of products by naming it in its spec, with an instruction that the template issues; ``direct``
and ``bulk`` are names of this operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import (
    BULK_PIPELINE,
    DIRECT_PIPELINE,
    IM2COL_PIPELINE,
    TAPS_PIPELINE,
    ConvConfig,
)

__all__ = [
    "BULK",
    "CPU_LOOPS",
    "CPU_PRODUCTS",
    "CUDA_PRODUCTS",
    "GPU_LOOPS",
    "HIP_PRODUCTS",
    "IM2COL",
    "PRODUCTS",
    "TAPS",
    "PipelineForm",
    "form_of",
    "offered_pipelines",
    "template_of",
]


@dataclass(frozen=True)
class PipelineForm:
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
    is_product: bool = True
    """Kernels compute a matrix product; those of the others have names of this operation."""
    header: str = ""
    """Header of the kernels; empty: by what they compute."""
    written: str = ""
    """Name of the pipeline in the kernel's source; empty: its own."""
    whole_steps: bool = False
    """Channels of a group fill whole steps along k, in accesses of 16 bytes; images are gathered for rows."""
    persistent: bool = False
    """Workgroups stay for several tiles."""
    wave_groups: bool = False
    """Groups of waves may alternate."""
    shuffled: bool = False
    """Without a product: results leave in whole lines, as the copy engine stores them."""
    line_chunks: bool = True
    """Threads gather lines of a tile in chunks of 16 bytes."""
    flat_filter: bool = False
    """Taps and channels of weights lie in one run in every direction, as a copy engine reads them."""
    packed_filter: bool = False
    """Weights lie one after the other."""
    wide_offsets: bool = False
    """Offsets have all bits, so that images need not be split."""
    copy_bytes: int = 0
    """Bytes of which addresses of operands are a multiple, beyond their elements' size."""

    def makes(self, config: ConvConfig) -> bool:
        """True if a configuration is of one of its pipelines."""
        return config.pipeline in self.names

    def has(self, name: str, arch: ArchSpec) -> bool:
        """True if ``name`` is one of its pipelines, and the arch has what the template needs."""
        if arch.kind not in self.kinds or name not in self.names or (self.bulk_copy and arch.bulk_copy is None):
            return False
        if not self.is_product:
            return True
        offered = arch.pipeline(name).instructions if name in arch.pipelines else ()
        return bool(offered) and (not self.instructions or not self.instructions.isdisjoint(offered))

    def drives(self, arch: ArchSpec) -> bool:
        """True if the arch has one of its pipelines."""
        return any(self.has(name, arch) for name in self.names)


CPU_PRODUCTS = PipelineForm(("compv3",), ("cpu",), "conv_cpu.cpp.in")
HIP_PRODUCTS = PipelineForm(("mem", "compv3", "compv4"), ("hip",), "conv_gpu.cu.in")
CUDA_PRODUCTS = PipelineForm(("compv3", "compv4"), ("cuda",), "conv_gpu.cu.in", frozenset({"simt", "mma"}))
IM2COL = PipelineForm(
    (IM2COL_PIPELINE,),
    ("cuda",),
    "conv_sm90.cu.in",
    frozenset({"wgmma"}),
    bulk_copy=True,
    header="conv.hpp",
    persistent=True,
    wave_groups=True,
    line_chunks=False,
    flat_filter=True,
    wide_offsets=True,
    copy_bytes=16,
)
TAPS = PipelineForm(
    (TAPS_PIPELINE,),
    ("hip",),
    "conv_gpu.cu.in",
    header="taps.hpp",
    written="compv4",
    whole_steps=True,
)
PRODUCTS = (CPU_PRODUCTS, HIP_PRODUCTS, CUDA_PRODUCTS, IM2COL, TAPS)
"""Implicit and pointwise products, the preferred pipeline first."""
CPU_LOOPS = PipelineForm((DIRECT_PIPELINE,), ("cpu",), "conv_cpu.cpp.in", is_product=False)
GPU_LOOPS = PipelineForm((DIRECT_PIPELINE,), ("cuda", "hip"), "conv_gpu.cu.in", is_product=False)
BULK = PipelineForm(
    (BULK_PIPELINE,),
    ("cuda",),
    "conv_gpu.cu.in",
    bulk_copy=True,
    is_product=False,
    header="merged/bulk.hpp",
    shuffled=True,
    packed_filter=True,
)
_FORMS = (*PRODUCTS, CPU_LOOPS, GPU_LOOPS, BULK)
_OF_OTHERS = PipelineForm((), (), "")
_BY_NAME = {name: form for form in reversed(_FORMS) for name in form.names}


def form_of(name: str) -> PipelineForm:
    """The form of a pipeline: what its kernels ask of configurations and tensors, on any kind of device."""
    return _BY_NAME.get(name, _OF_OTHERS)


def offered_pipelines(arch: ArchSpec) -> tuple[str, ...]:
    """Pipelines of the arch's spec that convolution has templates for."""
    return tuple(name for form in PRODUCTS for name in form.names if form.has(name, arch))


def template_of(name: str, kind: str) -> str:
    """The template of a pipeline on a kind of device; of an unknown one the template of most kernels of that kind."""
    forms = [form for form in _FORMS if kind in form.kinds]
    return next((form.template for form in forms if name in form.names), forms[0].template)

"""Kernels and registries in a few words, for people."""

from __future__ import annotations

from collections import Counter

from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.vocabulary import Kind, Scale, Specialization
from tilewright_kit.kernel_sets.registry import Registry
from tilewright_kit.types.vocabulary import Binary, Unary

__all__ = ["format_config", "format_registry"]


def format_config(config: ConvConfig) -> str:
    """What the kernel computes, then how, then what is special about it, for example ``forward 2d fp16 nhwgc: compv4
    128x128x32, waves 2x2x1 of 32x32x16; relu``.
    """
    types = "/".join(dict.fromkeys((config.image_dtype, config.other_dtype, config.c)))
    what = f"{config.variant} {config.ndim}d {types} {config.layout}"
    if config.is_matrix:
        tile, wave, warp = ("x".join(map(str, sizes)) for sizes in (config.tile, config.wave, config.warp_tile))
        how = f"{config.pipeline} {tile}, waves {wave} of {warp}"
    else:
        how = f"{config.kind}, {config.waves} waves"
    notes = [
        text
        for text, holds in (
            (f"accesses of {'/'.join(map(str, config.vector_sizes))}", config.vector_sizes != ConvConfig.vector_sizes),
            (f"merges {config.num_groups_to_merge} groups", config.num_groups_to_merge > 1),
            ("the image as a matrix", config.kind is Kind.POINTWISE),
            (config.specialization.value, config.is_matrix and config.specialization is not Specialization.DEFAULT),
            (f"{config.split_k} slices", config.split_k > 1),
            ("two stages", config.two_stage),
            (f"bias {config.bias}", bool(config.bias)),
            (f"{config.num_d_tensors} D by {config.binary}", config.binary is not Binary.NONE),
            (f"scale by {config.scale}", config.scale is not Scale.NONE),
            (config.unary.value, config.unary is not Unary.NONE),
            ("adds to the gradient", config.accumulate),
        )
        if holds
    ]
    return "; ".join((f"{what}: {how}", *notes))


def format_registry(registry: Registry) -> str:
    """How many kernels of convolution there are, by direction, dimension, type and arch; one line for each."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for entry in registry:
        if isinstance(entry.config, ConvConfig):
            config = entry.config
            counts[(config.variant, f"{config.ndim}d", config.a, entry.arch)] += 1
    lines = [f"{registry.name}: {sum(counts.values())} kernels of convolution"]
    lines += [f"  {' '.join(key)}: {count}" for key, count in sorted(counts.items())]
    return "\n".join(lines)

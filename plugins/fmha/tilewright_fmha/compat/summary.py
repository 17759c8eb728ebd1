"""Kernels and registries in a few words, for people."""

from __future__ import annotations

from collections import Counter

from tilewright_fmha.config.config import FLAGS, FmhaConfig
from tilewright_fmha.config.defaults import ELEMENTWISE
from tilewright_fmha.vocabulary import BiasKind, MaskKind, QScale, Rope, VLayout
from tilewright_kit.kernel_sets.registry import Registry

__all__ = ["format_config", "format_registry"]


def format_config(config: FmhaConfig) -> str:
    """What the kernel computes, then how, then what is special about it, for example ``fwd bf16 batch h128x128:
    qr_async 128x64x32x128x32x128, waves 4x1x1 of 16x16x16; causal, lse``.
    """
    what = f"{config.family} {config.dtype} {config.mode} h{'x'.join(map(str, config.hdim))}"
    how = config.pipeline
    if config.family not in ELEMENTWISE:
        tile, wave, warp = ("x".join(map(str, sizes)) for sizes in (config.tile, config.wave[:3], config.warp_tile[:3]))
        how = f"{config.pipeline} {tile}, waves {wave} of {warp}"
    notes = [
        text
        for text, holds in (
            (config.mask.value, config.mask is not MaskKind.NO),
            (f"bias {config.bias}", config.bias is not BiasKind.NO),
            ("values by column", config.v_layout is VLayout.VC),
            (f"scales {config.qscale}", config.qscale is not QScale.NO),
            (f"rope {config.rope}", config.rope is not Rope.NONE),
            (f"{config.kv_layout} pages by {config.kv_lookup}", config.paged),
            (f"pages of {config.page_size}", config.page_size > 0),
            ("heads packed", config.pack_gqa),
        )
        if holds
    ]
    notes += [name.replace("_", " ") for name in FLAGS if name != "paged" and getattr(config, name)]
    return f"{what}: {how}" + (f"; {', '.join(notes)}" if notes else "")


def format_registry(registry: Registry) -> str:
    """How many kernels of attention there are, by family, type and arch; one line for each."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for entry in registry:
        if isinstance(entry.config, FmhaConfig):
            counts[(entry.config.family.value, entry.config.dtype.value, entry.arch)] += 1
    lines = [f"{registry.name}: {sum(counts.values())} kernels of attention"]
    lines += [f"  {' '.join(key)}: {count}" for key, count in sorted(counts.items())]
    return "\n".join(lines)

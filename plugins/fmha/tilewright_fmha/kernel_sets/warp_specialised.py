"""Default kernels of the warp-specialised pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from tilewright_fmha.config.config import CONFIGS, FmhaConfig
from tilewright_fmha.config.decode import decode_algorithms
from tilewright_fmha.config.gradients import GRADIENT_HEADS, gradient_algorithm
from tilewright_fmha.config.latent import LATENT_HEADS, latent_algorithms
from tilewright_fmha.config.warp_specialised import HEADS, parts_algorithm, specialised_algorithms
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, Family, FmhaDType, KvLookup, MaskKind, Mode
from tilewright_kit.kernel_sets.declare import Declaration, DeferredDeclarations, declare

__all__ = ["WS_DEFAULTS"]

Declarations = Iterator[Declaration[FmhaConfig]]

_CONFIG, _BACKWARD_CONFIG = CONFIGS[ATTENTION], CONFIGS[ATTENTION_BACKWARD]
_BYTES_HEADS = [(64, 64), (128, 128)]
"""Heads of caches of 8 bits, and those of which few rows have every feature."""
_USUAL: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (64, 64): ((192, 128), (128, 128)), (128, 128): ((128, 128),), (192, 128): ((128, 128),), (256, 256): ((128, 64),),
}  # fmt: skip
"""Queries and keys of the tiles that planners mostly take of Hopper's own kernels, by heads."""


def _forward() -> Declarations:
    """Hopper's own: every cut with a causal mask and without, and each feature in a cut that most problems get."""
    plain: dict[str, Any] = {"mask": MaskKind.CAUSAL, "lse": True}
    pages: dict[str, Any] = {**plain, "paged": True}
    features: tuple[dict[str, Any], ...] = (
        {**plain, "dtype": FmhaDType.FP16},
        {**plain, "mode": Mode.GROUP},
        {"mask": MaskKind.CAUSAL, "softcap": True, "learned_sinks": True},
        {"mask": MaskKind.WINDOW, "sink": True, "skip_min_seqlen_q": True, "mode": Mode.GROUP},
        {**pages, "family": Family.PAGEDKV},
        {**pages, "family": Family.BATCH_PREFILL, "mode": Mode.GROUP, "kv_lookup": KvLookup.SGLANG},
    )
    for hdim in HEADS:
        for cut in specialised_algorithms(hdim):
            own = {"dtype": FmhaDType.BF16, "hdim": hdim, **cut}
            yield declare(_CONFIG, **own, mask=[MaskKind.NONE, MaskKind.CAUSAL])
            if cut["tile"][:2] in _USUAL[hdim]:
                yield from (declare(_CONFIG, **{**own, **fields}) for fields in features)
    yield from _few_rows(pages)
    yield from _latent(pages)
    yield from _parts({**pages, "mask": MaskKind.NONE})


def _parts(pages: Mapping[str, Any]) -> Declarations:
    """Hopper's own of many rows over parts of the keys: prefixes in pages, and every feature of the usual heads."""
    features: tuple[Mapping[str, Any], ...] = (
        {"dtype": FmhaDType.FP16, "pack_gqa": False},
        {**pages, "mode": Mode.GROUP, "kv_lookup": KvLookup.SGLANG, "softcap": True, "skip_min_seqlen_q": True},
    )
    for hdim in HEADS:
        own: dict[str, Any] = {"family": Family.SPLITKV, "max_splits_log2": 7, "dtype": FmhaDType.BF16, "hdim": hdim}
        own |= {**parts_algorithm(hdim), "pack_gqa": True}
        yield declare(_CONFIG, **{**own, **pages})
        if hdim in _BYTES_HEADS:
            yield from (declare(_CONFIG, **{**own, **fields}) for fields in features)


def _few_rows(pages: Mapping[str, Any]) -> Declarations:
    """Hopper's own for few rows: every cut, and what caches in pages and windows need with the fewest rows."""
    features: tuple[Mapping[str, Any], ...] = (
        pages,
        {**pages, "mode": Mode.GROUP, "kv_lookup": KvLookup.SGLANG},
        {"mask": MaskKind.WINDOW, "sink": True, "softcap": True, "learned_sinks": True, "skip_min_seqlen_q": True},
    )
    for dtype, heads in ((FmhaDType.BF16, HEADS), (FmhaDType.BF16FP8, _BYTES_HEADS)):
        for hdim in heads:
            own: dict[str, Any] = {"family": Family.SPLITKV, "max_splits_log2": 5, "dtype": dtype, "hdim": hdim}
            cuts = list(decode_algorithms(hdim, dtype))
            yield from (declare(_CONFIG, **own, **cut) for cut in cuts)
            if hdim in _BYTES_HEADS:
                yield from (declare(_CONFIG, **{**own, **cuts[0], **fields}) for fields in features)


def _latent(pages: Mapping[str, Any]) -> Declarations:
    """Hopper's own over latent caches: every cut, in pages too, and every feature in two of them."""
    features: tuple[Mapping[str, Any], ...] = (
        {"dtype": FmhaDType.FP16},
        {**pages, "mode": Mode.GROUP, "kv_lookup": KvLookup.SGLANG},
        {"mask": MaskKind.WINDOW, "sink": True, "softcap": True, "learned_sinks": True, "lse": True},
    )
    own: dict[str, Any] = {"family": Family.SPLITKV, "max_splits_log2": 7, "dtype": FmhaDType.BF16}
    own["hdim"] = LATENT_HEADS
    for cut in latent_algorithms():
        yield declare(_CONFIG, **own, **cut)
        yield declare(_CONFIG, **{**own, **cut, **pages})
        if cut["tile"][0] in (16, 64):
            yield from (declare(_CONFIG, **{**own, **cut, **fields}) for fields in features)


def _gradients() -> Declarations:
    """Hopper's own of gradients: every mask, in a fixed order and in any."""
    for hdim in GRADIENT_HEADS:
        own = {"dtype": FmhaDType.BF16, "hdim": hdim, **gradient_algorithm(hdim)}
        masks = [MaskKind.NONE, MaskKind.CAUSAL]
        yield declare(_BACKWARD_CONFIG, **own, mask=[*masks, MaskKind.WINDOW], deterministic=True)
        yield declare(_BACKWARD_CONFIG, **own, mask=masks, deterministic=False)
        yield declare(_BACKWARD_CONFIG, **{**own, "dtype": FmhaDType.FP16}, mask=MaskKind.CAUSAL, deterministic=True)


WS_DEFAULTS = DeferredDeclarations(lambda: chain(_forward(), _gradients()))

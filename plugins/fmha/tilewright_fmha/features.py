"""Inputs of a learned model, from problem, kernel and arch."""

from __future__ import annotations

import math

from tilewright_fmha.config.config import FLAGS, FmhaConfig
from tilewright_fmha.launch.splits import choose_splits
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import BiasKind, Family, MaskKind, Mode, QScale
from tilewright_kit.contract.device import DeviceInfo

__all__ = ["fmha_features"]

_FAMILIES = {family: code for code, family in enumerate(Family)}
_MASKS = {mask: code for code, mask in enumerate(MaskKind)}
_BIASES = {bias: code for code, bias in enumerate(BiasKind)}
_SCALES = {scale: code for code, scale in enumerate(QScale)}
_PIPELINES = (
    "qr", "qr_async", "qs", "qr_async_trload", "v3", "qr_pagedkv", "qr_nwarp_sshuffle", "appendkv",
    "batch_prefill_async", "bwd", "splitkv_combine", "ws",
)  # fmt: skip
"""Codes are places in this list: new words are appended, never moved."""


def fmha_features(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> dict[str, float]:
    """All features, always under the same names and in the same order."""
    sizes = {name: getattr(problem, name) for name in ("batch", "heads_q", "heads_k", "seq_q", "seq_k")}
    found: dict[str, float] = {**sizes, "hdim_q": problem.hdim_q, "hdim_v": problem.hdim_v, "group": problem.group}
    found |= {f"log2_{name}": math.log2(max(size, 1)) for name, size in sizes.items()}
    every = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    found |= {
        "log2_flops": math.log2(max(problem.flops, 1)),
        "intensity": problem.flops / max(problem.bytes_moved, 1),
        "visible": problem.pairs / every if every else 1.0,
        "is_decode": problem.is_decode,
        "page_size": problem.paging.page_size if problem.paging else 0,
        "bytes_q": config.q.bytes,
        "bytes_kv": config.kv.bytes,
        "bytes_o": config.o.bytes,
        "varlen": config.mode is Mode.GROUP,
        "family": _FAMILIES[config.family],
        "pipeline": _PIPELINES.index(config.pipeline) if config.pipeline in _PIPELINES else -1,
        "mask": _MASKS[config.mask],
        "bias": _BIASES[config.bias],
        "qscale": _SCALES[config.qscale],
        "splits": choose_splits(problem, config, device),
        "pack_gqa": config.pack_gqa,
        "persistent": config.persistent,
        "kernel_hdim_q": config.hdim[0],
        "kernel_hdim_v": config.hdim[1],
    }
    found |= {name: getattr(config, name) for name in FLAGS}
    for name in ("m0", "n0", "k0", "n1", "k1", "k0max"):
        found[f"tile_{name}"] = getattr(config, name)
    for what in ("wave", "warp_tile"):
        found |= {f"{what}_{letter}": size for letter, size in zip("mnk", getattr(config, what)[:3], strict=True)}
    for letter, size, tile in (("q", problem.seq_q, config.m0), ("k", problem.seq_k, config.n0)):
        tiles = -(-size // max(tile, 1))
        found |= {f"tiles_{letter}": tiles, f"tile_eff_{letter}": size / max(tiles * tile, 1)}
    arch = device.arch
    found |= {
        "units": device.units or arch.throughput.units,
        "clock_mhz": arch.throughput.clock_mhz,
        "lds_bytes": arch.lds_bytes,
        "l2_bytes": arch.caches.l2_bytes,
        "l3_bytes": arch.caches.l3_bytes,
    }
    return {name: float(value) for name, value in found.items()}

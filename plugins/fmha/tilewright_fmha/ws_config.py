"""What configurations of specialised kernels mean: the Python mirror of ``tilewright/sm90/fmha_plan.hpp``."""

from __future__ import annotations

from tilewright_arch import ArchSpec
from tilewright_fmha.config import FmhaConfig
from tilewright_fmha.words import MaskKind

__all__ = ["HEADS", "draws_tiles", "has_own_results", "specialised_bytes", "specialised_heads"]

HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Elements of heads of q and v that there are kernels for; the copy engine pads others."""

_BARRIER_BYTES = 256
_BYTES = 2
"""Of an element."""


def specialised_heads(q: int, v: int) -> tuple[int, int] | None:
    """The smallest heads of specialised kernels that hold those of ``q`` and ``v`` elements; None if there are none."""
    return next((item for item in HEADS if item[0] >= q and item[1] >= v), None)


def draws_tiles(config: FmhaConfig) -> bool:
    """Workgroups stay and draw tiles from a counter: those that differ in length."""
    return config.pipeline == "ws" and config.persistent and (config.varlen or config.mask is not MaskKind.NO)


def specialised_bytes(config: FmhaConfig, arch: ArchSpec) -> int:
    """Shared memory: Q, rings of keys and values, and results of their own where there is room; else these take the
    place of Q.
    """
    return _loaded(config) + _results(config) * has_own_results(config, arch) + _BARRIER_BYTES


def has_own_results(config: FmhaConfig, arch: ArchSpec) -> bool:
    """There is room for results beside what is loaded."""
    return _loaded(config) + _results(config) + _BARRIER_BYTES <= arch.lds_bytes


def _loaded(config: FmhaConfig) -> int:
    (q, v), stages = config.hdim, config.stages or 2
    return (config.m0 * q + stages * config.n0 * (q + v)) * _BYTES


def _results(config: FmhaConfig) -> int:
    return config.m0 * config.hdim[1] * _BYTES

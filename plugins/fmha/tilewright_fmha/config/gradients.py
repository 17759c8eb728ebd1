"""Specialised kernels of gradients: the Python mirror of ``tilewright/sm90/fmha/backward.hpp``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.judging import must_be
from tilewright_fmha.config.pipelines import SPECIALISED, is_specialised
from tilewright_fmha.vocabulary import Family, Scheduling
from tilewright_kit.config.rules import Violation
from tilewright_kit.types.arithmetic import ceil_div

__all__ = [
    "GRADIENT_HEADS",
    "gradient_algorithm",
    "gradient_form",
    "gradient_heads",
    "specialised_gradient",
    "specialised_gradient_bytes",
    "turns_of",
]

GRADIENT_HEADS = ((64, 64), (128, 128))
"""Elements of heads of q and v; the copy engine pads others."""
_QUERIES, _KEYS, _CONSUMERS, _STAGES = 64, 128, 2, 2
_BYTES = 2
"""Bytes of an element."""
_BARRIER_BYTES = (4 * _STAGES + 1) * 8 + 16
"""With the number that a workgroup draws, and its counts of turns."""


def specialised_gradient(config: FmhaConfig) -> bool:
    """A specialised kernel of gradients."""
    return is_specialised(config) and config.family is Family.DQ_DK_DV


def gradient_heads(q: int, v: int) -> tuple[int, int] | None:
    """The smallest heads of such kernels that hold those of ``q`` and ``v`` elements; None if there are none."""
    return next((item for item in GRADIENT_HEADS if item[0] >= q and item[1] >= v), None)


def gradient_algorithm(hdim: tuple[int, int]) -> Mapping[str, Any]:
    """How kernels of these heads are cut. Consumers share out keys, and columns of dQ."""
    q, v = hdim
    keys, each = _KEYS // _CONSUMERS, q // _CONSUMERS
    return {
        "pipeline": SPECIALISED,
        "tile": (_QUERIES, _KEYS, q, _QUERIES, v, _QUERIES, _KEYS, q, v),
        "wave": (1, _CONSUMERS, 1, _CONSUMERS, 1, 1, 1, _CONSUMERS, 1),
        "warp_tile": (_QUERIES, keys, 16, keys, v, 16, _QUERIES, each, 16),
    }


def specialised_gradient_bytes(config: FmhaConfig) -> int:
    """Shared memory: K and V, rings of Q and dO and of their rows' numbers, and dS of two blocks of queries."""
    queries, keys, (q, v) = config.m0, config.n0, config.hdim
    rings = _STAGES * (queries * (q + v) * _BYTES + 2 * queries * 4)
    return keys * (q + v) * _BYTES + rings + 2 * keys * queries * _BYTES + _BARRIER_BYTES


def turns_of(config: FmhaConfig, heads: int, rows: int) -> int:
    """Counters that tell whose turn it is to add to dQ, for ``heads`` heads of ``rows`` queries."""
    return heads * ceil_div(rows, config.m0) if specialised_gradient(config) and config.deterministic else 0


def gradient_form(config: FmhaConfig) -> Iterator[Violation]:
    """The rule ``ws_form`` of kernels of gradients: one cut for each size of heads."""
    if config.hdim not in GRADIENT_HEADS:
        other = gradient_heads(*config.hdim) or GRADIENT_HEADS[-1]
        reason = f"its heads are {', '.join(f'{q}x{v}' for q, v in GRADIENT_HEADS)}"
        yield Violation("ws_form", "hdim", config.hdim, reason, {"hdim": other})
        return
    reason = f"{_CONSUMERS} consumers have {_KEYS // _CONSUMERS} keys each, and go through {_QUERIES} queries at a time"
    for name, value in gradient_algorithm(config.hdim).items():
        yield from must_be("ws_form", config, name, value, reason)
    if config.scheduler is not Scheduling.DEFAULT:
        yield from must_be("ws_form", config, "scheduler", Scheduling.DEFAULT, "its consumers do not take turns")

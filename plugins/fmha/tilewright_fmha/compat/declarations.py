"""Named setters for declarations: tiles, waves and warp tiles by the names of their numbers.

    declare(AttentionConfig, tile=tile(m0=128, n0=64, k0=32), wave=wave(m0=4), warp_tile=warp(m0=16, n0=16, k0=16))

What is left out follows from what is given, as in the system that Tilewright rebuilds, or is a wildcard.
"""

from __future__ import annotations

from typing import Any

from tilewright_kit.kernel_sets.declare import ANY, AnyValue

__all__ = ["backward_tile", "tile", "warp", "wave"]

Number = int | AnyValue


def tile(
    m0: Number = ANY,
    n0: Number = ANY,
    k0: Number = ANY,
    n1: Number | None = None,
    k1: Number | None = None,
    k0max: Number | None = None,
) -> tuple[Any, ...]:
    """Six numbers. Unsaid, n1 is n0, k1 is k0 and k0max is k0."""
    return (m0, n0, k0, n0 if n1 is None else n1, k0 if k1 is None else k1, k0 if k0max is None else k0max)


def backward_tile(
    m0: Number = ANY, n0: Number = ANY, k0: Number = ANY, k1: Number = ANY, k2: Number = ANY, k3: Number = ANY,
    k4: Number = ANY, hdim_q: Number = ANY, hdim_v: Number = ANY,
) -> tuple[Any, ...]:  # fmt: skip
    """The nine numbers of gradients."""
    return (m0, n0, k0, k1, k2, k3, k4, hdim_q, hdim_v)


def wave(
    m0: Number = ANY, n0: Number = 1, k0: Number = 1, m1: Number | None = None, n1: Number | None = None,
    k1: Number | None = None, m2: Number = 1, n2: Number = 1, k2: Number = 1,
) -> tuple[Any, ...]:  # fmt: skip
    """Waves of three products. Unsaid, the second has those of the first, the third one."""
    return (m0, n0, k0, *_second((m0, n0, k0), (m1, n1, k1)), m2, n2, k2)


def warp(
    m0: Number = ANY, n0: Number = ANY, k0: Number = ANY, m1: Number | None = None, n1: Number | None = None,
    k1: Number | None = None, m2: Number = 16, n2: Number = 16, k2: Number = 16,
) -> tuple[Any, ...]:  # fmt: skip
    """Warp tiles of three products. Unsaid, the second has that of the first, the third 16x16x16."""
    return (m0, n0, k0, *_second((m0, n0, k0), (m1, n1, k1)), m2, n2, k2)


def _second(first: tuple[Number, ...], given: tuple[Number | None, ...]) -> tuple[Number, ...]:
    return tuple(own if value is None else value for own, value in zip(first, given, strict=True))

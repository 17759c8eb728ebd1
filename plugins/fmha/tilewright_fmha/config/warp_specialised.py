"""Derived sizes of warp-specialised kernels: the Python mirror of ``tilewright/sm90/fmha/plan.hpp``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decodes, splits_tiles
from tilewright_fmha.config.pipelines import SPECIALISED, is_specialised
from tilewright_fmha.vocabulary import MaskKind, Scheduling

__all__ = [
    "HEADS",
    "draws_tiles",
    "has_own_results",
    "parts_algorithm",
    "specialised_algorithms",
    "specialised_bytes",
    "specialised_heads",
]

_SHAPES: Mapping[tuple[int, int], tuple[tuple[int, int, bool], ...]] = {
    (64, 64): ((3, 128, True), (2, 192, True), (2, 128, True), (1, 128, False)),
    (128, 128): ((2, 128, True), (2, 128, False), (2, 160, True), (2, 176, False), (1, 128, False)),
    (192, 128): ((2, 128, False), (2, 112, False)),
    (256, 256): ((2, 80, False), (2, 64, False), (1, 64, False)),
}
"""Consumers, columns of a block, and whether consumers take turns, by heads: what was fastest on an H200 somewhere."""
_PARTS: Mapping[tuple[int, int], tuple[int, int, bool]] = {
    (64, 64): (2, 128, True), (128, 128): (2, 128, False), (192, 128): (2, 128, False), (256, 256): (2, 64, False),
}  # fmt: skip
"""The same of kernels over parts of the keys."""
HEADS = tuple(_SHAPES)
"""Elements of heads of q and v that there are kernels for; the copy engine pads others."""

_BARRIER_BYTES = 320
_BYTES = 2
"""Bytes of an element."""


def specialised_heads(q: int, v: int) -> tuple[int, int] | None:
    """The smallest heads of specialised kernels that hold those of ``q`` and ``v`` elements; None if there are none."""
    return next((item for item in HEADS if item[0] >= q and item[1] >= v), None)


def specialised_algorithms(hdim: tuple[int, int]) -> Iterator[Mapping[str, Any]]:
    """How kernels of these heads are cut, the preferred first; rules say for which a signature has registers."""
    yield from (_cut(hdim, *shape) for shape in _SHAPES.get(hdim, ()))


def parts_algorithm(hdim: tuple[int, int]) -> Mapping[str, Any]:
    """How kernels of these heads over parts of the keys are cut."""
    return _cut(hdim, *_PARTS[hdim])


def _cut(hdim: tuple[int, int], consumers: int, columns: int, turns: bool) -> Mapping[str, Any]:
    q, v = hdim
    return {
        "pipeline": SPECIALISED,
        "tile": (64 * consumers, columns, q, v, columns, q),
        "wave": (consumers, 1, 1, consumers, 1, 1, 1, 1, 1),
        "warp_tile": (64, columns, 16, 64, v, 16, 16, 16, 16),
        "persistent": True,
        "scheduler": Scheduling.PINGPONG if turns else Scheduling.DEFAULT,
    }


def draws_tiles(config: FmhaConfig) -> bool:
    """Workgroups stay and draw tiles from a counter: those that differ in length."""
    differ = config.varlen or config.mask is not MaskKind.NONE or decodes(config)
    return is_specialised(config) and config.persistent and differ


def specialised_bytes(config: FmhaConfig, arch: ArchSpec) -> int:
    """Shared memory: Q, rings of keys and values, and results of their own where there is room; else these take the
    place of Q. Parts of the keys leave registers for memory.
    """
    staged = has_own_results(config, arch) and not splits_tiles(config)
    return _loaded(config) + _results(config) * staged + _BARRIER_BYTES


def has_own_results(config: FmhaConfig, arch: ArchSpec) -> bool:
    """There is room for results beside what is loaded."""
    return _loaded(config) + _results(config) + _BARRIER_BYTES <= arch.lds_bytes


def _loaded(config: FmhaConfig) -> int:
    (q, v), stages = config.hdim, config.stages or 2
    return (config.m0 * q + stages * config.n0 * (q + v)) * _BYTES


def _results(config: FmhaConfig) -> int:
    return config.m0 * config.hdim[1] * _BYTES

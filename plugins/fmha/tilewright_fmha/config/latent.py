"""Specialised kernels over latent caches: the Python mirror of ``tilewright/sm90/fmha/latent.hpp``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import few_rows_cut
from tilewright_fmha.config.judging import must_be
from tilewright_fmha.config.pipelines import is_specialised
from tilewright_fmha.vocabulary import Family, FmhaDType, Scheduling
from tilewright_kit.config.rules import Violation
from tilewright_kit.types.arithmetic import ceil_div

__all__ = [
    "LATENT_HEADS",
    "holds_latent",
    "is_latent",
    "latent_algorithms",
    "latent_bytes",
    "latent_form",
    "latent_joins",
    "latent_threads",
]

LATENT_HEADS = (576, 512)
"""Elements of keys, a latent vector and a rotated part, and of values, the former alone."""
_ROWS = (8, 16, 32, 64)
"""Rows of a tile."""
_KEYS = 64
"""Keys of a block, those of an instruction."""
_CONSUMER_ROWS = 32
"""Rows of a consumer, whose results are the registers that it has."""
_WARPGROUP, _WARP = 128, 32
_BARRIER_BYTES, _MAXIMA_BYTES = 512, 32
"""Bytes of barriers, and of maxima for each row."""
_SLOT_ELEMENTS, _LEAST_STAGES = 192, 6
"""Elements of keys in a slot of the ring; slots of two blocks."""
_JOINED_PARTS = 8
"""Parts of the keys up to which the kernel adds them itself."""
_TYPES = (FmhaDType.FP16, FmhaDType.BF16)


def is_latent(config: FmhaConfig) -> bool:
    """A specialised kernel whose values lie in its keys."""
    return is_specialised(config) and config.family is Family.SPLITKV and config.hdim == LATENT_HEADS


def holds_latent(config: FmhaConfig) -> bool:
    """Such a kernel, or what adds up its parts, or puts it together with a shared prefix."""
    return is_latent(config) or (config.family in (Family.COMBINE, Family.MERGE) and config.hdim == LATENT_HEADS)


def latent_algorithms() -> Iterator[Mapping[str, Any]]:
    """How kernels are cut, the fewest rows first."""
    return (few_rows_cut(LATENT_HEADS, rows, _KEYS) for rows in _ROWS)


def latent_threads(config: FmhaConfig) -> int:
    """Threads of a workgroup: a warpgroup for each consumer, and a warp that produces, or a warpgroup that hands its
    registers over to two consumers.
    """
    consumers = _consumers(config)
    return consumers * _WARPGROUP + (_WARPGROUP if consumers > 1 else _WARP)


def latent_joins(config: FmhaConfig, splits: int) -> int:
    """Tickets for each tile of rows with which workgroups add parts of the keys, one of each consumer; 0: the combine
    stage adds them.
    """
    return _consumers(config) if splits <= _JOINED_PARTS else 0


def _consumers(config: FmhaConfig) -> int:
    return ceil_div(config.m0, _CONSUMER_ROWS)


def _slot(config: FmhaConfig) -> int:
    return config.n0 * _SLOT_ELEMENTS * config.kv.bytes


def _beside(config: FmhaConfig) -> int:
    """Bytes of queries, probabilities and maxima of all consumers, and of barriers."""
    return config.m0 * (config.hdim[0] * 2 + 128 + _MAXIMA_BYTES) + _BARRIER_BYTES


def _slots(config: FmhaConfig, arch: ArchSpec) -> int:
    return (arch.lds_bytes - _beside(config)) // _slot(config)


def latent_bytes(config: FmhaConfig, arch: ArchSpec) -> int:
    """Shared memory: a ring of parts of blocks of keys, and what is beside it."""
    return (config.stages or _slots(config, arch)) * _slot(config) + _beside(config)


def latent_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The rule ``ws_form`` of kernels over latent caches."""
    rows = next((item for item in _ROWS if item >= config.m0), _ROWS[-1])
    reason = f"workgroups stay, tiles have all heads of {', '.join(map(str, _ROWS))} rows, blocks {_KEYS} keys"
    for name, value in few_rows_cut(LATENT_HEADS, rows, _KEYS).items():
        yield from must_be("ws_form", config, name, value, reason)
    if config.dtype not in _TYPES:
        reason = f"keys, values and queries are {' or '.join(item.value for item in _TYPES)}"
        yield Violation("ws_form", "dtype", config.dtype.value, reason, {"dtype": FmhaDType.BF16})
    if config.scheduler is not Scheduling.DEFAULT:
        yield from must_be("ws_form", config, "scheduler", Scheduling.DEFAULT, "consumers take no turns")
    fitting = _slots(config, arch)
    if not (config.stages == 0 or _LEAST_STAGES <= config.stages <= fitting):
        reason = f"{_LEAST_STAGES} to {fitting} thirds of blocks are on their way"
        yield Violation("ws_form", "stages", config.stages, reason, {"stages": 0})

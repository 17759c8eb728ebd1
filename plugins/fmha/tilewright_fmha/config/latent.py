"""Specialised kernels over latent caches: the Python mirror of ``tilewright/sm90/fmha/latent.hpp``, for few rows, and
of ``tilewright/sm90/latent/plan.hpp``, whose rows are those of an instruction.
"""

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
    "latent_by_rows",
    "latent_bytes",
    "latent_form",
    "latent_joins",
    "latent_threads",
]

LATENT_HEADS = (576, 512)
"""Elements of keys, a latent vector and a rotated part, and of values, the former alone."""
_ROWS = (8, 16, 32)
"""Rows of a tile, where they are the columns of instructions."""
_KEYS = 64
"""Keys of a block, those of an instruction."""
_CONSUMER_ROWS = 32
"""Rows whose results are the registers that a consumer has, if it has all of their elements."""
_WARPGROUP, _WARP = 128, 32
_BARRIER_BYTES, _MAXIMA_BYTES = 512, 32
"""Bytes of barriers, and of maxima for each row."""
_SLOT_ELEMENTS, _LEAST_STAGES = 192, 6
"""Elements of keys in a slot of the ring of kernels for few rows; slots of two blocks."""
_JOINED_PARTS = 8
"""Parts of the keys up to which the kernel adds them itself."""
_FULL_ROWS = 64
"""Rows of a tile, where they are those of instructions."""
_FULL_TILE = (_FULL_ROWS, _KEYS, 16, _FULL_ROWS, LATENT_HEADS[1] // 2, 16, 16, 16, 16)
"""Instructions of a consumer, which has half of the elements of values."""
_ROW_BYTES, _RING_BARRIER_BYTES = 24, 640
"""Bytes of maxima and sums for each row, and of barriers of a ring of panels."""
_BLOCKS = 2
"""Blocks of keys that fill such a ring."""
_TYPES = (FmhaDType.FP16, FmhaDType.BF16)


def is_latent(config: FmhaConfig) -> bool:
    """A specialised kernel whose values lie in its keys."""
    return is_specialised(config) and config.family is Family.SPLITKV and config.hdim == LATENT_HEADS


def holds_latent(config: FmhaConfig) -> bool:
    """Such a kernel, or what adds up its parts, or puts it together with a shared prefix."""
    return is_latent(config) or (config.family in (Family.COMBINE, Family.MERGE) and config.hdim == LATENT_HEADS)


def latent_by_rows(config: FmhaConfig) -> bool:
    """Such a kernel whose instructions have queries as rows: two consumers share them."""
    return is_latent(config) and config.m0 > _ROWS[-1]


def latent_algorithms() -> Iterator[Mapping[str, Any]]:
    """How kernels are cut, the fewest rows first."""
    yield from (few_rows_cut(LATENT_HEADS, rows, _KEYS) for rows in _ROWS)
    yield _full_rows_cut()


def _full_rows_cut() -> Mapping[str, Any]:
    return {**few_rows_cut(LATENT_HEADS, _FULL_ROWS, _KEYS), "warp_tile": _FULL_TILE}


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
    if latent_by_rows(config):
        queries, keys = (rows * config.hdim[0] * config.kv.bytes for rows in (config.m0, _BLOCKS * config.n0))
        return keys + queries + config.m0 * (128 + _ROW_BYTES) + _RING_BARRIER_BYTES
    return (config.stages or _slots(config, arch)) * _slot(config) + _beside(config)


def latent_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The rule ``ws_form`` of kernels over latent caches."""
    cuts = {item["tile"][0]: item for item in latent_algorithms()}
    reason = f"workgroups stay, tiles have all heads of {', '.join(map(str, cuts))} rows, blocks {_KEYS} keys"
    for name, value in next((item for rows, item in cuts.items() if rows >= config.m0), cuts[_FULL_ROWS]).items():
        yield from must_be("ws_form", config, name, value, reason)
    if config.dtype not in _TYPES:
        reason = f"keys, values and queries are {' or '.join(item.value for item in _TYPES)}"
        yield Violation("ws_form", "dtype", config.dtype.value, reason, {"dtype": FmhaDType.BF16})
    if config.scheduler is not Scheduling.DEFAULT:
        yield from must_be("ws_form", config, "scheduler", Scheduling.DEFAULT, "consumers take no turns")
    if latent_by_rows(config):
        yield from must_be("ws_form", config, "stages", 0, f"{_BLOCKS} blocks of keys are on their way")
        return
    fitting = _slots(config, arch)
    if not (config.stages == 0 or _LEAST_STAGES <= config.stages <= fitting):
        reason = f"{_LEAST_STAGES} to {fitting} thirds of blocks are on their way"
        yield Violation("ws_form", "stages", config.stages, reason, {"stages": 0})

"""Specialised kernels for few rows of queries: the Python mirror of ``tilewright/sm90/fmha/decode_plan.hpp``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.judging import must_be
from tilewright_fmha.config.pipelines import SPECIALISED, is_specialised
from tilewright_fmha.vocabulary import Family, FmhaDType, Scheduling
from tilewright_kit.config.rules import Violation
from tilewright_kit.types.arithmetic import ceil_div

__all__ = [
    "DECODE_THREADS",
    "decode_algorithms",
    "decode_bytes",
    "decode_form",
    "decode_heads",
    "decode_resident",
    "decodes",
    "few_rows_cut",
    "splits_tiles",
]

DECODE_THREADS = 128 + 32
"""Threads of a warpgroup that consumes, and a warp that produces."""
_HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
_BYTES_HEADS = ((64, 64), (128, 128))
"""Head sizes of 8-bit caches: panels of 128 elements, or one of 64."""
_ROWS, _BYTES_ROWS = (8, 16, 32), (8, 16)
"""Rows of a tile: for caches of 16 bits; of 8, which need registers on their way."""
_TILE_ROWS = 64
"""Rows of an instruction, where they are queries."""
_STEP = 64
"""Keys of an instruction."""
_SLOT_BYTES, _LEAST_KEYS, _MOST_KEYS = 16 << 10, 64, 256
"""Bytes of keys or values of a block: so many bytes keep instructions busy, and few slots are few barriers."""
_MOST_STAGES = 12
_STAGES, _STAGES_ALONE = 3, 6
"""Slots of a ring: more were slower on an H200. A workgroup that has its multiprocessor alone has as many as two."""
_SHARE = (228 << 10) // 2 - 1024
"""Shared memory of each of two workgroups of a multiprocessor of 228 KiB, of which each takes one beside its own."""
_BARRIER_BYTES = 512
_EIGHT_BITS = (FmhaDType.FP16FP8, FmhaDType.BF16FP8)


def decodes(config: FmhaConfig) -> bool:
    """A specialised kernel for few rows."""
    return is_specialised(config) and config.family is Family.SPLITKV and not splits_tiles(config)


def splits_tiles(config: FmhaConfig) -> bool:
    """A specialised kernel of many rows over parts of the keys, of which a prefix that sequences share has many."""
    many = config.m0 >= _TILE_ROWS and max(config.hdim) <= _HEADS[-1][0]
    return is_specialised(config) and config.family is Family.SPLITKV and many


def decode_heads(dtype: FmhaDType, q: int, v: int) -> tuple[int, int] | None:
    """The smallest heads of such kernels that hold those of ``q`` and ``v`` elements; None if there are none."""
    heads = _BYTES_HEADS if dtype in _EIGHT_BITS else _HEADS
    return next((item for item in heads if item[0] >= q and item[1] >= v), None)


def decode_algorithms(hdim: tuple[int, int], dtype: FmhaDType) -> Iterator[Mapping[str, Any]]:
    """How kernels of these heads are cut, the fewest rows first."""
    keys = _SLOT_BYTES // (max(hdim) * dtype.kv.bytes) // _STEP * _STEP
    keys = min(max(keys, _LEAST_KEYS), _MOST_KEYS)
    for rows in _rows(dtype):
        yield few_rows_cut(hdim, rows, keys)


def _rows(dtype: FmhaDType) -> tuple[int, ...]:
    return _BYTES_ROWS if dtype in _EIGHT_BITS else _ROWS


def few_rows_cut(hdim: tuple[int, int], rows: int, keys: int) -> Mapping[str, Any]:
    """Tile, waves and instructions of a consumer of few rows, whose blocks have ``keys`` keys."""
    q, v = hdim
    return {
        "pipeline": SPECIALISED,
        "tile": (rows, keys, q, v, keys, q),
        "wave": (1, 1, 1, 1, 1, 1, 1, 1, 1),
        "warp_tile": (rows, _STEP, 16, rows, _STEP, 16, 16, 16, 16),
        "persistent": True,
        "pack_gqa": True,
    }


def _slot(config: FmhaConfig) -> int:
    return config.n0 * max(config.hdim) * config.kv.bytes


def _beside(config: FmhaConfig) -> int:
    """Bytes of queries and probabilities, reused by accumulators at the end; of maxima of four warps, twice; of
    barriers."""
    (q, v), m0 = config.hdim, config.m0
    rows = max(m0 * q * 2 + ceil_div(config.n0, _STEP) * m0 * 128, ceil_div(m0 * ((v + 8) * 4 + 8), 16) * 16)
    return rows + 2 * 4 * m0 * 4 + _BARRIER_BYTES


def decode_resident(config: FmhaConfig) -> int:
    """Workgroups that share a multiprocessor."""
    return 2 if _beside(config) + _STAGES * _slot(config) <= _SHARE else 1


def _slots(config: FmhaConfig, arch: ArchSpec) -> int:
    room = _SHARE if decode_resident(config) == 2 else arch.lds_bytes
    return min((room - _beside(config)) // _slot(config), _MOST_STAGES)


def _stages(config: FmhaConfig, arch: ArchSpec) -> int:
    return config.stages or min(_slots(config, arch), _STAGES if decode_resident(config) == 2 else _STAGES_ALONE)


def decode_bytes(config: FmhaConfig, arch: ArchSpec) -> int:
    """Shared memory: a ring of slots for keys or values of a block, and what is beside it."""
    return _stages(config, arch) * _slot(config) + _beside(config)


def decode_form(config: FmhaConfig, arch: ArchSpec) -> Iterator[Violation]:
    """The rule ``ws_form`` of kernels for few rows."""
    heads = _BYTES_HEADS if config.dtype in _EIGHT_BITS else _HEADS
    if config.hdim not in heads:
        other = decode_heads(config.dtype, *config.hdim) or heads[-1]
        reason = f"its heads are {', '.join(f'{q}x{v}' for q, v in heads)}"
        yield Violation("ws_form", "hdim", config.hdim, reason, {"hdim": other})
        return
    offered = _rows(config.dtype)
    rows = next((item for item in offered if item >= config.m0), offered[-1])
    keys = min(max(config.n0 // _STEP, 1) * _STEP, _MOST_KEYS)
    reason = (
        f"workgroups stay, tiles have all heads of {', '.join(map(str, offered))} rows, blocks up to {_MOST_KEYS} keys"
    )
    for name, value in few_rows_cut(config.hdim, rows, keys).items():
        yield from must_be("ws_form", config, name, value, reason)
    if config.scheduler is not Scheduling.DEFAULT:
        yield from must_be("ws_form", config, "scheduler", Scheduling.DEFAULT, "there is one consumer")
    fitting = _slots(config, arch)
    if fitting < 2 or not (config.stages == 0 or 2 <= config.stages <= fitting):
        fix: dict[str, Any] = {"stages": 0}
        if fitting < 2:
            smaller = few_rows_cut(config.hdim, rows, _LEAST_KEYS)
            fix = {name: smaller[name] for name in ("tile", "warp_tile")}
        yield Violation("ws_form", "stages", config.stages, f"2 to {fitting} blocks are on their way", fix)

"""How many parts the keys are cut into where queries are too few to keep a device busy."""

from __future__ import annotations

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decodes, splits_tiles
from tilewright_fmha.config.latent import is_latent, latent_joins
from tilewright_fmha.config.pipelines import FEW_ROWS
from tilewright_fmha.footprint.gpu import resident
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import Family
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.arithmetic import ceil_div

__all__ = [
    "LEAST_BLOCKS",
    "choose_splits",
    "share_overhead",
    "share_workgroups",
    "shares_keys",
    "tickets_of",
    "wants_splits",
    "work_items",
]

LEAST_BLOCKS = 4
"""Blocks of keys below which cutting them does not pay."""
_MOST_TILES = 4
"""Tiles of rows up to which it pays: every one reads all keys."""
_MOST_ROWS = 64
"""The same of specialised kernels."""
_MOST_TILED = 256
"""The same of those with tiles of many rows, where keys do not lie in pages: beyond, nothing was measured."""
_PIECE, _SHORT_PIECE, _TAIL = 0.8, 3.0, 0.25
"""Where lengths differ, specialised kernels draw pieces, whose beginnings are hidden but for so many blocks of keys,
more where a key has few bytes and its products take as long as its copy; and so much of a whole piece passes from when
the first workgroups find none left to the end. A fit to seven batches of 8 to 128 sequences with up to 4096 to 16384
keys of bf16 on an H200, in 1 to 16 parts (``bench/lab/ragged_decode.py``).
"""
_LONG_KEY = 256
"""Bytes of a long key."""
_SHARE_OVERHEAD, _SHORT_SHARE_OVERHEAD = 1, 3
"""The same where workgroups have equal shares of all keys."""
_SHARE_LEAST = 2
"""Blocks of a share, at least (``FmhaShare::kLeast``)."""
_SHARE_ROOM = 8
"""Blocks that sequences have room for, below which pieces are drawn: to find a share takes two microseconds."""
_ABREAST = 8
"""Heads that have a share side by side, at most (``fmha_abreast``)."""
_EQUAL_SHARE = 1 / 3
"""How far equal lengths count where they are data: parts that suit those that differ cost equal ones up to 5 %."""
_PER_UNIT = 2
"""Pieces for each unit: so many, for lengths differ."""
_START = 9.0
"""Cost of beginning a piece and of ending it, in blocks of keys. This and ``_PART`` are a fit to 13 steps of decoding
on an H200: what they choose takes at most 3 % longer than the best number of parts, and up to 7 % where lengths differ.
"""
_RAGGED = 0.1
"""How much of a piece is waited for where lengths differ."""
_PART = 1 / 4
"""Cost of adding a part to the others, in blocks."""
_TILE_START, _TILE_PART = 2.0, 2.0
"""The same of tiles of many rows, whose blocks take 2 microseconds: of beginning and ending a part, and of adding up a
tile of every unit.
"""


def tickets_of(config: FmhaConfig, device: DeviceInfo, splits: int) -> int:
    """Counters for each tile of rows of a split kernel that adds the parts of the keys without a second stage
    (``gpu/fmha/splitkv_reduce.hpp``); 0 for others.
    """
    if is_latent(config):
        return latent_joins(config, splits)
    return int((config.pipeline == FEW_ROWS and device.arch.kind == "cuda") or decodes(config))


def work_items(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> int:
    """Pieces of work of an unsplit launch."""
    if device.arch.kind == "cpu" or config.pack_gqa:
        return problem.batch * problem.heads_k * ceil_div(problem.seq_q * problem.group, max(config.m0, 1))
    return problem.batch * problem.heads_q * ceil_div(problem.seq_q, max(config.m0, 1))


def shares_keys(problem: FmhaProblem, config: FmhaConfig) -> bool:
    """True if workgroups have equal shares of all keys, whatever the lengths are: where these are data, unless the
    caller says how many parts there are (``sm90/parts/shares.hpp``).
    """
    ragged = problem.varlen or problem.has("seqlens_k")
    asked = problem.num_splits or config.num_splits
    one_tile = config.pack_gqa and problem.seq_q * problem.group <= config.m0
    if not decodes(config) or is_latent(config) or config.sink or asked:
        return False
    return ragged and one_tile and problem.seq_k >= _SHARE_ROOM * config.n0


def share_overhead(problem: FmhaProblem, config: FmhaConfig) -> int:
    """Blocks of keys that a tile counts in a share more than it has."""
    return _SHARE_OVERHEAD if problem.hdim_q * config.kv.bytes >= _LONG_KEY else _SHORT_SHARE_OVERHEAD


def share_workgroups(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> int:
    """Workgroups among whom all keys are shared, as many for each of up to eight heads."""
    blocks = ceil_div(max(problem.seq_k, 1), config.n0)
    pieces = max(work_items(problem, config, device), 1) * ceil_div(blocks, _SHARE_LEAST)
    abreast = min(problem.heads_k & -problem.heads_k, _ABREAST)
    slots = max(device.units, 1) * resident(config, device.arch)
    return min(pieces, max(slots // abreast, 1) * abreast)


def wants_splits(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> bool:
    """True if cutting the keys could pay: too little work for all units, and keys enough. Kernels for few rows are only
    split ones.
    """
    if is_latent(config):
        return True  # no other kernels of GPUs have such heads
    if decodes(config):
        return problem.seq_q * problem.group <= _MOST_ROWS
    if splits_tiles(config):
        if problem.paging is None and problem.seq_q * problem.group > _MOST_TILED:
            return False
        if config.pack_gqa and problem.seq_q < config.m0:
            return True  # others leave rows of tiles empty
    if config.pipeline == FEW_ROWS:
        rows = problem.seq_q * (problem.group if config.pack_gqa else 1)
        return rows <= _MOST_TILES * config.m0 and problem.seq_k >= LEAST_BLOCKS * config.n0
    units = config.team if device.arch.kind == "cpu" else device.units
    return work_items(problem, config, device) < units and problem.seq_k >= LEAST_BLOCKS * config.n0


def choose_splits(problem: FmhaProblem, config: FmhaConfig, device: DeviceInfo) -> int:
    """Parts of the keys in a plan of ``config``: what the caller asked for, else what the kernel is declared for, else
    as many as keep all units busy, from capacities alone. 1 for other families.
    """
    if config.family is not Family.SPLITKV:
        return 1
    asked = problem.num_splits or config.num_splits
    if asked:
        return min(asked, config.max_splits)
    cpu = device.arch.kind == "cpu"
    units = config.team if cpu else max(device.units, 1)
    items = max(work_items(problem, config, device), 1)
    blocks = ceil_div(max(problem.seq_k, 1), max(config.n0, 1))
    if (config.pipeline == FEW_ROWS or decodes(config)) and not cpu:
        slots = units * resident(config, device.arch)
        ragged = problem.varlen or problem.has("seqlens_k")
        if shares_keys(problem, config):
            return 1
        if ragged and decodes(config) and not is_latent(config):
            each = _PIECE if problem.hdim_q * config.kv.bytes >= _LONG_KEY else _SHORT_PIECE
            return _uneven(problem.batch, items, blocks, slots, config.max_splits, each)
        return _even(items, blocks, slots, config.max_splits, ragged)
    if splits_tiles(config):
        return _rounds(items, blocks, units, config.max_splits)
    wanted = ceil_div(units * (1 if cpu and config.team <= items else _PER_UNIT), items)
    return max(min(wanted, blocks, config.max_splits), 1)


def _even(items: int, blocks: int, slots: int, most: int, ragged: bool) -> int:
    """Parts that let pieces fill whole rounds of the workgroups that a device holds at once. Where lengths differ, a
    piece that begins late is counted as well.
    """

    def cost(parts: int) -> float:
        piece = ceil_div(blocks, parts) + _START
        return piece * (ceil_div(items * parts, slots) + _RAGGED * ragged) + parts * _PART

    return min(range(1, min(most, blocks) + 1), key=cost)


def _rounds(items: int, blocks: int, units: int, most: int) -> int:
    """Parts of tiles that products bind: whole rounds of the units. A part costs its results, written and read."""

    def cost(parts: int) -> float:
        rounds = ceil_div(items * parts, units)
        return rounds * (ceil_div(blocks, parts) + _TILE_START) + _TILE_PART * parts * items / units

    return min(range(1, min(most, blocks) + 1), key=cost)


def _uneven(batch: int, items: int, blocks: int, slots: int, most: int, each: float) -> int:
    """Parts for pieces that are drawn, where ``batch`` sequences have any lengths up to ``blocks``: short pieces end
    together, and every one costs ``each`` blocks.
    """

    def cost(parts: int) -> float:
        piece, begun = blocks / parts, each * items * parts / slots + parts * _PART
        equal = piece * ceil_div(items * parts, slots)
        longest = piece * batch / (batch + 1)
        differing = max(items * blocks / (2 * slots) + _TAIL * longest, longest)
        return begun + _EQUAL_SHARE * equal + (1 - _EQUAL_SHARE) * differing

    return min(range(1, min(most, blocks) + 1), key=cost)

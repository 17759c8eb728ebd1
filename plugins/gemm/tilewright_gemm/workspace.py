"""Scratch memory of a CPU launch: the Python mirror of ``workspace_bytes`` in ``tilewright/cpu/blocking.hpp``.

Every kernel exports its own figure (role ``workspace``); a test compares the two over many configurations and problems.
"""

from __future__ import annotations

from tilewright_gemm.config import GemmConfig
from tilewright_gemm.packing import packed_bytes
from tilewright_gemm.problem import Product
from tilewright_gemm.words import Binary, ScaleA, ScaleB, Unary
from tilewright_kit.tiles.cpu_cost import SHARED_BYTES
from tilewright_kit.tiles.tiled import GROUP_BYTES

__all__ = ["slice_length", "slices", "workspace_bytes"]

_SKINNY = 8
_STREAM_COLUMNS = 512
_STREAM_VECTOR = 16


def slice_length(k: int, split: int, tile_k: int) -> int:
    """k covered by one slice of split-K: a multiple of tile_k."""
    return k if split <= 1 else _up(-(-k // split), tile_k)


def slices(k: int, split: int, tile_k: int) -> int:
    """Slices that are not empty: at most ``split``, fewer if K is short."""
    return -(-k // slice_length(k, split, tile_k)) if k and split > 1 else 1


def workspace_bytes(config: GemmConfig, products: tuple[Product, ...], split: int) -> int:
    """Bytes that a launch of ``config`` on ``products`` needs, in ``split`` slices of K."""
    member = partial = 0
    blocked = (0, 0, 0, 0)
    for product in products:
        k = slice_length(product.k, split, config.tile[2])
        if split > 1:
            partial += product.batch * split * product.m * product.n * GROUP_BYTES
        if config.pipeline == "mem":
            member = max(member, _streaming(config, k))
        elif config.pipeline == "compv1":
            member = max(member, _in_place(config, product.m, k))
        else:
            sizes = _blocked(config, product.m, product.n, k)
            blocked = tuple(map(max, blocked, sizes))  # type: ignore[assignment]
    team = config.waves
    copies = team if config.scheduler != "intrawave" else 2 if team > 1 else 1
    return _up(partial, 64) + copies * blocked[0] + team * (sum(blocked[1:]) + member)


def _streaming(config: GemmConfig, k: int) -> int:
    return _SKINNY * GROUP_BYTES * (_up(-(-k // config.warp_tile[2]), _STREAM_VECTOR) + _STREAM_COLUMNS)


def _in_place(config: GemmConfig, m: int, k: int) -> int:
    mr, nr, depth = config.warp_tile
    return packed_bytes(m, k, mr, depth, False) + packed_bytes(nr, k, nr, depth, _offset_a(config))


def _blocked(config: GemmConfig, m: int, n: int, k: int) -> tuple[int, int, int, int]:
    """Bytes of the shared packed operand, and of one member's slab, column sums and unfinished tiles."""
    mr, nr, depth = config.warp_tile
    shares_b = config.tile[1] >= config.tile[0]
    shared_r, slab_r = (nr, mr) if shares_b else (mr, nr)
    extent, tile = (n, config.tile[1]) if shares_b else (m, config.tile[0])
    slab_extent, slab_tile = (m, config.tile[0]) if shares_b else (n, config.tile[1])
    groups, block = -(-k // depth), -(-config.tile[2] // depth)
    fitting = max(SHARED_BYTES // (4 * max(groups, 1)) // shared_r, 1) * shared_r
    length = min(_up(extent, shared_r), max(tile, shared_r) // shared_r * shared_r, fitting)
    slab = min(_up(slab_extent, slab_r), _up(slab_tile, slab_r))
    of_team = own = sums = unfinished = 0
    if not (shares_b and config.preshuffle):
        of_team = packed_bytes(length, k, shared_r, depth, shares_b and _offset_a(config))
    if shares_b or not config.preshuffle:
        own = _up(slab * min(groups, block) * GROUP_BYTES, 64)
        if not shares_b and _offset_a(config):
            sums = _up(slab * GROUP_BYTES, 64)
    if not _accumulates_in_c(config) and groups > block:
        unfinished = _up(slab * length * GROUP_BYTES, 64)
    return of_team, own, sums, unfinished


def _offset_a(config: GemmConfig) -> bool:
    """Whether A is packed unsigned, so that B carries column sums."""
    return config.a == "int8" and config.warp_tile[2] == 4


def _accumulates_in_c(config: GemmConfig) -> bool:
    """Whether C can hold partial sums: it has the accumulator's type, and nothing but alpha follows."""
    plain = (
        not config.bias
        and not config.num_d_tensors
        and config.scale_a is ScaleA.NONE
        and config.scale_b is ScaleB.NONE
        and config.unary is Unary.PASS
        and config.binary is Binary.PASS
    )
    return plain and config.c == config.acc


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit

"""Workspace of a CPU launch: the Python mirror of ``workspace_bytes`` in ``tilewright/cpu/blocks/blocking.hpp``, whose
blocked part is the kit's.

Every kernel exports its own figure (role ``workspace``); a test compares the two over many configurations and problems.
"""

from __future__ import annotations

from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.problem.problem import Product
from tilewright_kit.tiles.footprint.cpu import (
    ALIGNMENT,
    block_bytes,
    packed_bytes,
    packs_unsigned,
    slice_length,
    sums_in_c,
)
from tilewright_kit.tiles.tiled import GROUP_BYTES
from tilewright_kit.types.arithmetic import ceil_div, padded

__all__ = ["workspace_bytes"]

_SKINNY = 8
_STREAM_COLUMNS = 512
_STREAM_VECTOR = 16


def workspace_bytes(config: GemmConfig, products: tuple[Product, ...], split: int) -> int:
    """Bytes that a launch of ``config`` on ``products`` needs, in ``split`` slices of K."""
    if config.int4:  # unpacked to fp32: a depth of one, and sums of that type
        config = config.replace(warp_tile=(*config.warp_tile[:2], 1), dtype_acc="fp32")
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
            sizes = block_bytes(config, product.m, product.n, k, sums_in_c(config))
            blocked = tuple(map(max, blocked, sizes))  # type: ignore[assignment]
    team = config.waves
    copies = team if config.scheduler != "intrawave" else 2 if team > 1 else 1
    return padded(partial, ALIGNMENT) + copies * blocked[0] + team * (sum(blocked[1:]) + member)


def _streaming(config: GemmConfig, k: int) -> int:
    return _SKINNY * GROUP_BYTES * (padded(ceil_div(k, config.warp_tile[2]), _STREAM_VECTOR) + _STREAM_COLUMNS)


def _in_place(config: GemmConfig, m: int, k: int) -> int:
    mr, nr, depth = config.warp_tile
    return packed_bytes(m, k, mr, depth, False) + packed_bytes(nr, k, nr, depth, packs_unsigned(config))

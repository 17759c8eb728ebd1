"""Division of a product among workgroups that have one output tile each, for static analysis."""

from __future__ import annotations

import math

from tilewright_kit.contract.abilities import Product, WorkShare

__all__ = ["tile_share"]


def tile_share(product: Product, tile: tuple[int, int, int], split_k: int = 1) -> WorkShare:
    """Slices of whole steps of ``tile`` along k, ``split_k`` of them for every output tile."""
    m, n, k = tile
    steps = math.ceil(math.ceil(product.k / k) / split_k)
    return WorkShare(
        slices=math.ceil(product.m / m) * math.ceil(product.n / n) * split_k * product.batch,
        flops=2.0 * m * n * steps * k,
        useful_flops=2.0 * product.m * product.n * product.k * product.batch,
        bytes_begin=(m + n) * k * product.dtype.bytes,
        bytes_end=m * n * product.dtype_out.bytes,
    )

"""The order of kernels by how their rows suit the longest sequence."""

from __future__ import annotations

import pytest
from fmha_configs import AMD, valid

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.tile_order import category, tile_order


def _rows(*rows: int, ranks: tuple[int, ...] = ()) -> list[FmhaConfig]:
    base = valid(AMD, hdim=(128, 128))
    ranks = ranks or (0,) * len(rows)
    return [base.replace(tile=(m0, *base.tile[1:]), selection_rank=rank) for m0, rank in zip(rows, ranks, strict=True)]


@pytest.mark.parametrize(
    ("max_sq", "order"),
    [
        (1, [16, 32, 64, 128, 256]),
        (16, [16, 32, 64, 128, 256]),
        (40, [64, 128, 256, 16, 32]),  # 8 rows for nothing by 16, 24 by 32
        (64, [64, 128, 256, 32, 16]),
        (100, [128, 256, 16, 32, 64]),
        (384, [128, 64, 32, 16, 256]),
        (512, [256, 128, 64, 32, 16]),
        (1000, [16, 32, 64, 128, 256]),
    ],
)
def test_the_order_prefers_tiles_that_hold_a_sequence_then_those_that_divide_it(max_sq: int, order: list[int]) -> None:
    found = tile_order(_rows(128, 16, 256, 64, 32), max_sq)
    assert [config.m0 for config in found] == order


def test_rank_decides_among_equal_rows_and_names_among_equal_ranks() -> None:
    first, second = _rows(64, 64, ranks=(2, 1))
    assert tile_order([first, second], 64) == [second, first]
    twins = [first.replace(lse=True), first]
    assert tile_order(twins, 64) == sorted(twins, key=lambda config: config.name)
    assert tile_order(twins[::-1], 64) == tile_order(twins, 64)


def test_a_short_sequence_has_the_smallest_tile_that_holds_it_and_a_long_one_the_largest_that_divides_it() -> None:
    assert category(128, 100) == 0
    assert [config.m0 for config in tile_order(_rows(256, 128, 64), 512)] == [256, 128, 64]
    assert [config.m0 for config in tile_order(_rows(32, 64, 128), 20)] == [32, 64, 128]

"""The order of kernels by how their rows suit the longest sequence, and the flaw of the one that it mends."""

from __future__ import annotations

import pytest
from fmha_configs import AMD, valid

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.tile_order import category, seeds_category, seeds_order, seqtune_order


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
    found = seqtune_order(_rows(128, 16, 256, 64, 32), max_sq)
    assert [config.m0 for config in found] == order


def test_rank_decides_among_equal_rows_and_names_among_equal_ranks() -> None:
    first, second = _rows(64, 64, ranks=(2, 1))
    assert seqtune_order([first, second], 64) == [second, first]
    twins = [first.replace(lse=True), first]
    assert seqtune_order(twins, 64) == sorted(twins, key=lambda config: config.name)
    assert seqtune_order(twins[::-1], 64) == seqtune_order(twins, 64)


@pytest.mark.parametrize(
    ("m0", "max_sq", "largest", "expected"),
    [
        (128, 128, 256, 0),
        (64, 64, 256, 0),
        (64, 1000, 256, 1),
        (64, 63, 256, 1),
        (256, 1000, 256, 2),
        (128, 256, 256, 3),
        (128, 300, 256, 4),
        (128, 100, 256, 4),
    ],
)
def test_the_seeds_categories(m0: int, max_sq: int, largest: int, expected: int) -> None:
    assert seeds_category(m0, max_sq, largest) == expected


def test_the_flaw_a_short_sequence_reached_no_first_category_and_64_rows_came_first() -> None:
    # 100 queries fit a tile of 128, which no category there knew; tiles of 64 came before what divides 512.
    assert category(128, 100) == 0 and seeds_category(128, 100, 256) == 4
    configs = _rows(256, 128, 64)
    assert [config.m0 for config in seeds_order(configs, 512)] == [64, 256, 128]
    assert [config.m0 for config in seqtune_order(configs, 512)] == [256, 128, 64]
    assert [config.m0 for config in seeds_order(_rows(32, 64, 128), 20)] == [64, 128, 32]
    assert [config.m0 for config in seqtune_order(_rows(32, 64, 128), 20)] == [32, 64, 128]

"""The pieces of cost models agree with their formulas and never decide on what is not known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright_kit.tiles.cost.units import unit_efficiency

counts = st.integers(1, 10_000)


@given(counts, counts, counts)
def test_efficiencies_are_parts_of_one(blocks: int, units: int, per_unit: int) -> None:
    assert 0 < unit_efficiency(blocks, units, per_unit) <= 1


def test_one_block_more_than_fits_costs_a_round() -> None:
    assert unit_efficiency(132, 132) == 1.0
    assert unit_efficiency(133, 132) == pytest.approx(133 / 264)


def test_fewer_blocks_than_the_device_holds_are_no_slower_for_it() -> None:
    # Eight units that hold four blocks each: eight blocks keep every unit busy.
    assert unit_efficiency(8, 8, 4) == 1.0
    assert unit_efficiency(9, 8, 4) == pytest.approx(9 / 16)

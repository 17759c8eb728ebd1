"""The pieces of cost models agree with their formulas and never decide on what is not known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright_kit.tiles.cost.units import (
    Traffic,
    Work,
    estimate,
    rounds,
    tile_efficiency,
    unit_efficiency,
)

counts = st.integers(1, 10_000)
rates = st.floats(0, 1e15)


def test_tile_efficiency_is_the_useful_part_of_whole_tiles() -> None:
    assert tile_efficiency([128, 256], [128, 128]) == 1.0
    assert tile_efficiency([129, 128], [128, 128]) == pytest.approx(129 / 256)
    assert tile_efficiency([0, 5], [128, 5]) == 1.0


@given(counts, counts, counts)
def test_efficiencies_are_parts_of_one(blocks: int, units: int, per_unit: int) -> None:
    assert 0 < unit_efficiency(blocks, units, per_unit) <= 1
    assert 0 < tile_efficiency([blocks], [units]) <= 1
    assert (
        (rounds(blocks, units, per_unit) - 1) * units * per_unit
        < blocks
        <= rounds(blocks, units, per_unit) * units * per_unit
    )


def test_one_block_more_than_fits_costs_a_round() -> None:
    assert unit_efficiency(132, 132) == 1.0
    assert unit_efficiency(133, 132) == pytest.approx(133 / 264)


def test_fewer_blocks_than_the_device_holds_are_no_slower_for_it() -> None:
    # Eight units that hold four blocks each: eight blocks keep every unit busy.
    assert unit_efficiency(8, 8, 4) == 1.0
    assert unit_efficiency(9, 8, 4) == pytest.approx(9 / 16)


def test_the_slowest_part_decides_and_overlap_hides_the_other() -> None:
    work = Work(1e9, 1e12, 0.5, (Traffic("l2", 1e6, 1e9), Traffic("memory", 1e6, 1e8)), 2, 1e-6, 1.0, {"pack": 1e-3})
    prediction = estimate(work)
    assert prediction.seconds == pytest.approx(max(2e-3, 1e-2) + 2e-6 + 1e-3)
    assert prediction.parts["compute"] == pytest.approx(2e-3)
    serial = estimate(Work(1e9, 1e12, 0.5, work.traffic, overlap=0.0))
    assert serial.seconds == pytest.approx(1.2e-2)


@given(rates, rates, st.floats(0, 1), rates, rates, st.floats(0, 1))
def test_an_estimate_is_positive_and_finite(
    flops: float, peak: float, efficiency: float, nbytes: float, bandwidth: float, overlap: float
) -> None:
    # Rates below one per second do not occur; unknown ones are zero.
    peak, bandwidth = (rate if rate >= 1 else 0.0 for rate in (peak, bandwidth))
    seconds = estimate(Work(flops, peak, efficiency, (Traffic("memory", nbytes, bandwidth),), overlap=overlap)).seconds
    assert seconds > 0
    assert math.isfinite(seconds)

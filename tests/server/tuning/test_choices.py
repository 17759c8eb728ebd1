"""Strategies are compared by the times of what they choose."""

from __future__ import annotations

import pytest

from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_kit.selection.invariant import BatchInvariant
from tilewright_kit.selection.strategies import Heuristic, Selector
from tilewright_kit.types.errors import UnsupportedError
from tilewright_tools.tuning.choices import Choices
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.measure.timing import TimingOptions
from tilewright_tools.tuning.sweep import SweepOptions

OPTIONS = SweepOptions("cpu:0", timing=TimingOptions(warmup=1, repeat=4, seconds=0.05))
CASES = [Case(1, 48, 40), Case(96, 48, 40)]


def test_what_each_strategy_chooses_is_timed_and_told_beside_the_first(plain: Setup) -> None:
    engine = plain.engine()
    strategies = {"heuristic": Heuristic(), "batch_invariant": BatchInvariant()}
    sweep = Choices(engine, plain, OPTIONS, strategies)
    results = list(sweep.run(CASES))
    operation = engine.operations["gemm"]
    for case in CASES:
        problem = operation.parse(case.request())
        chosen = {Selector(item).rank(operation, problem, sweep.device)[0].config.name for item in strategies.values()}
        assert {item.kernel for item in results if item.case == case} == chosen
    (line,) = sweep.told(results)
    assert line.startswith("batch_invariant takes ")
    assert "of the time of heuristic (geometric mean of 2 problems)" in line
    sweep.close()
    engine.close()


def test_every_number_of_rows_gets_one_kernel_and_odd_strides_a_reason(plain: Setup) -> None:
    engine = plain.engine()
    operation, device = engine.operations["gemm"], engine.devices.info("cpu:0")
    selector = Selector(BatchInvariant())
    rows = (1, 3, 8, 100, 5000)
    kernels = {selector.rank(operation, operation.parse(Case(m, 48, 40).request()), device)[0].config for m in rows}
    assert len(kernels) == 1
    packing = engine.operations["gemm_pack_b"]
    sample = next(iter(packing.samples()))
    with pytest.raises(UnsupportedError, match="depend on one another"):
        selector.rank(packing, packing.parse(sample), device)
    engine.close()

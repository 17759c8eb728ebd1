"""An oracle judges the server's choice by timings that did not decide who is the best, and can be gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_kit.selection.strategies import FirstFit, Heuristic
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.measure.timing import TimingOptions
from tilewright_tools.tuning.oracle import Oracle, score
from tilewright_tools.tuning.results import Output, Result
from tilewright_tools.tuning.sweep import SweepOptions

pytestmark = pytest.mark.slow

CASE = Case(24, 48, 40)
OPTIONS = SweepOptions("cpu:0", configs="wide", timing=TimingOptions(warmup=1, repeat=8, seconds=0.05), cut_off=0.0)


@pytest.fixture
def oracle(plain: Setup) -> Iterator[Oracle]:
    engine = plain.engine()
    found = Oracle(engine, plain, OPTIONS, (Heuristic(), FirstFit()), draws=3)
    yield found
    found.close()
    engine.close()


def last(results: list[Result]) -> dict[str, Result]:
    return {item.kernel: item for item in results}


def test_finalists_have_their_draws_and_the_judged_ones_a_second_timing(oracle: Oracle, tmp_path: Path) -> None:
    with Output(tmp_path / "rows.jsonl") as output:
        for item in oracle.run([CASE]):
            output.add(item)
    with Output(tmp_path / "rows.jsonl", resume=True) as output:
        found = last(output.results)
        known = {CASE: output.results}
    assert all(item.status == "ok" for item in found.values())
    assert all(len(json.loads(item.draws)) == 3 for item in found.values())
    best = min(found.values(), key=lambda item: item.median_ns)
    judged = {item.kernel for item in found.values() if item.place in (1, 2)}
    assert {item.kernel for item in found.values() if item.again_ns} == {best.kernel, *judged}
    told = score(list(found.values()))
    assert told is not None
    assert 0 < told.mean <= 1
    assert "repeatability" in str(told)
    assert list(oracle.run([CASE], known)) == []  # nothing is measured twice


def test_an_oracle_that_was_killed_before_its_final_goes_on(oracle: Oracle) -> None:
    heats = [item for item in oracle.run([CASE]) if not item.draws]
    rest = last(list(oracle.run([CASE], {CASE: heats[:-1]})))
    assert [item.kernel for item in heats if not rest[item.kernel].draws] == []
    assert len(rest) == len(heats)
    assert score([item for item in heats if not item.again_ns]) is None

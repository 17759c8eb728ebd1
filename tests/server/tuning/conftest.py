"""Sweeps on the CPU device, with a cache that the tests of this folder share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.measure.timing import TimingOptions
from tilewright_tools.tuning.sweep import Sweep, SweepOptions

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

QUICK = TimingOptions(warmup=1, repeat=8, seconds=0.05)
MakeSweep = Callable[..., Sweep]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuning") / "cache"


@pytest.fixture
def plain(cache_dir: Path) -> Setup:
    return Setup(str(cache_dir), ("cpu", "gemm"), cpu_threads=1)


@pytest.fixture
def planted(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """GEMM with faults, also in the worker."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    return Setup(str(cache_dir), ("cpu",), modules=("planted_gemm",), cpu_threads=1)


@pytest.fixture
def make_sweep() -> Iterator[MakeSweep]:
    """A sweep on the CPU; options as keywords."""
    closing: list[Callable[[], None]] = []

    def make(setup: Setup, **options: Any) -> Sweep:
        engine = setup.engine()
        closing.append(engine.close)
        sweep = Sweep(engine, setup, SweepOptions(**{"device": "cpu:0", "timing": QUICK, **options}))
        closing.append(sweep.close)
        return sweep

    yield make
    for close in reversed(closing):
        close()

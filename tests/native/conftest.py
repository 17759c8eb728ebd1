"""Fixtures of the native tests: one build folder and one thread pool for the whole session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path: their helpers are found here

from native_harness import LEVELS, RUNTIME, Runtime, build_once, missing_features


@pytest.fixture(scope="session")
def build_folder(built_kernels: Path) -> Path:
    """Shared by the workers of a parallel run, who build each unit once between them, and by later runs."""
    folder = built_kernels / "native_units"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def runtime(build_folder: Path) -> Iterator[Runtime]:
    runtime = Runtime(build_once(build_folder, RUNTIME.read_text(), ["-pthread"]), 2)
    yield runtime
    runtime.lib.tw_pool_close(runtime.pool)


@pytest.fixture(scope="session", params=list(LEVELS))
def level(request: pytest.FixtureRequest) -> str:
    """Every instruction-set level that this machine can run."""
    missing = missing_features(request.param)
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(missing)}")
    return str(request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh numbers in every run; the seed is printed with a failure."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    sys.stdout.write(f"seed {seed}\n")
    return np.random.default_rng(seed)

"""An engine with the vector operation on the CPU device, and a cache that tests share unless they ask for their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright_server.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).parent))

from engine_harness import open_engine
from executor_bench import Bench
from vector_operation import VectorOperation

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "cache"


@pytest.fixture
def make_engine(warm_cache: Path) -> Iterator[MakeEngine]:
    """Options as keywords; ``toolchains`` goes to the engine itself."""
    engines: list[Engine] = []

    def make(toolchains: Any = None, **options: Any) -> Engine:
        engines.append(open_engine(options.pop("cache_dir", warm_cache), toolchains, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


@pytest.fixture
def operation(engine: Engine) -> VectorOperation:
    operation = engine.operations["vector"]
    assert isinstance(operation, VectorOperation)
    return operation


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.threads.shutdown()

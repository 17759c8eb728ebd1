"""Clients of the service that launch in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.launch.library import load_library


@pytest.fixture(scope="session", autouse=True)
def library() -> Any:
    try:
        return load_library()
    except tw.UnavailableError as error:
        pytest.skip(f"no libtilewright: {error}")


@pytest.fixture
def caller(real_server) -> Iterator[tw.Client]:
    """A client that launches nowhere else."""
    with tw.connect(real_server.target, launch="caller") as opened:
        yield opened


@pytest.fixture
def auto(real_server) -> Iterator[tw.Client]:
    with tw.connect(real_server.target) as opened:
        yield opened


@pytest.fixture
def apart(real_server) -> Iterator[tw.Client]:
    """A client that has everything launched by the server."""
    with tw.connect(real_server.target, launch="server") as opened:
        yield opened


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)

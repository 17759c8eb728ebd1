"""Imported before every test module."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports gRPC: the client asks it to survive forks, which tests of forked children need.
import tilewright  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--foreign-emulator",
        default="",
        metavar="COMMAND",
        help="another emulator of AMD GPUs (tests/emulator/foreign.py)",
    )
    parser.addoption(
        "--gates", action="store_true", help="compile whole sets and record what passed (tests/kernels/gated.py)"
    )


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact cache for all servers of a run, in all its workers: for tests to which it is no matter who built."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernel_cache"

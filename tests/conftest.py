"""Imported before every test module."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports gRPC: the client asks it to survive forks, which tests of forked children need.
import tilewright  # noqa: F401

# An example that takes long on a busy machine is no failure.
settings.register_profile("tilewright", deadline=None)
settings.load_profile("tilewright")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, then those with many: at the end no worker waits long for another's file."""
    usual = [item for item in items if not item.get_closest_marker("exhaustive")]
    counts = Counter(item.path for item in usual)
    slow = {item.path for item in usual if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -counts[item.path], str(item.path)))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the run, for all its workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def kernel_cache(shared_folder: Path) -> Path:
    """An artifact cache for all servers of a run, in all its workers: for tests to which it is no matter who built."""
    return shared_folder / "kernel_cache"


@pytest.fixture(scope="session")
def kernel_folder(shared_folder: Path) -> Path:
    """Where all workers keep kernels that are built without a server (``kernels/cpu_kernels.py``)."""
    folder = shared_folder / "cpu_kernels"
    folder.mkdir(exist_ok=True)
    return folder

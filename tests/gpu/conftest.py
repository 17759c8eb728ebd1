"""A server on the machine's NVIDIA GPU, and PyTorch as the other process's owner of memory.

    make test-gpu

Everything here is skipped, with the reason, where there is no GPU or no PyTorch for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tilewright

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path: their helpers are found here

from gpu_server import CudaServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):  # of all tests, so that comparing paths would take long
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def torch() -> Any:
    module = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not module.cuda.is_available():
        pytest.skip("there is no NVIDIA GPU that PyTorch can use")
    return module


@pytest.fixture(scope="module")
def server(torch: Any) -> Iterator[CudaServer]:
    with CudaServer() as running:
        yield running


@pytest.fixture
def client(server: CudaServer) -> Iterator[tilewright.Client]:
    with tilewright.connect(server.target) as made:
        yield made


@pytest.fixture
def gpu_memory_of() -> Callable[[int], int]:
    """Bytes of GPU memory that a process uses, as the driver counts them."""

    def used(pid: int) -> int:
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        rows = [line.split(",") for line in answer.strip().splitlines()]
        return sum(int(mib) for owner, mib in rows if int(owner) == pid) << 20

    return used

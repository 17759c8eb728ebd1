"""A service for the operations of PyTorch; without PyTorch there is nothing to collect here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import tilewright as tw
from tilewright_tools.cli.private_server import PrivateServer


@pytest.fixture(scope="module")
def client(kernel_cache: Path) -> Iterator[tw.Client]:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    if not entry_points(group="tilewright.plugins"):
        pytest.skip("the distribution is not installed, so the service has no plugins")
    import tilewright.torch as twt

    # Tensors are the CPU's; tests/gpu has those of a GPU. B is packed for CPUs alone.
    flags = ("--cache-dir", str(kernel_cache), "--log-level", "warning", "--device", "cpu:0")
    with PrivateServer(flags) as target, tw.connect(target) as found:
        twt.use(found)
        yield found
        twt.use(None)

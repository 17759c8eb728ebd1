"""A driver in host memory, and a server that only writes down what it is asked."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from device_server import DeviceServer
from fake_cuda import FakeCuda
from producers import torch_like

import tilewright as tw
from tilewright.gpu import cuda

sys.path.insert(0, str(Path(__file__).parent))  # for the operands beside the tests

from device_operands import STREAM


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setattr(cuda, "_loaded", made.driver())
    return made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DeviceServer]:
    with DeviceServer.running(tmp_path) as (made, made.target):
        yield made


@pytest.fixture
def client(server: DeviceServer, fake: FakeCuda) -> Iterator[tw.Client]:
    with tw.connect(server.target) as opened:
        yield opened


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> Any:
    module = torch_like(STREAM)

    def empty_strided(shape: tuple[int, ...], steps: tuple[int, ...], dtype: str, device: str) -> Any:
        module.made.append((shape, dtype, device))
        return module.Tensor(fake.allocate(1 << 16), shape, dtype, steps)

    module.empty_strided = empty_strided
    monkeypatch.setitem(sys.modules, "torch", module)
    return module

"""A service on a GPU whose driver is simulated, and the same driver in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from producers import torch_like
from simulated_gpu import HERE, PART, SIMULATED, TAG, Gpu, built, service

import tilewright as tw
from tilewright.gpu import cuda


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("simulated")
    # By that name libtilewright finds it in this process.
    own = built(HERE / "client_cuda.c", tmp_path_factory.mktemp("client") / "libcuda.so.1")
    yield built(SIMULATED / "libcuda.c", folder / "libcuda.so.1"), own
    for left in Path("/dev/shm").glob(f"tw{TAG}-*"):
        left.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def target(libraries: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[str]:
    with service(libraries, tmp_path_factory.mktemp("service"), kernel_cache) as address:
        yield address


@pytest.fixture
def gpu(libraries: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setenv("TW_SIM_TAG", TAG)
    monkeypatch.setattr(cuda, "LIBRARY", str(libraries[1]))
    monkeypatch.setattr(cuda, "_loaded", None)
    return Gpu(libraries[1])


@pytest.fixture
def torch(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = torch_like(gpu.stream())
    module.empty_strided = lambda shape, steps, dtype, device: module.Tensor(gpu.allocate(PART), shape, dtype, steps)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def client(target: str, gpu: Gpu) -> Iterator[tw.Client]:
    with tw.connect(target, launch="server") as opened:
        yield opened

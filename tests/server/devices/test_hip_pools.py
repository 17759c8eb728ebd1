"""Pools of other processes on AMD GPUs other than the first, where the runtime would import them on the wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilewright_kit.types.errors import UnsupportedError
from tilewright_server.devices.contract import MemoryHandle
from tilewright_server.devices.gpu.memory.sharing import Importer
from tilewright_server.devices.hip.driver.driver import Driver


def test_a_pool_for_another_gpu_than_the_first_is_refused_before_the_runtime_sees_it() -> None:
    driver: Any = Driver.__new__(Driver)
    driver.api = None  # a call of the runtime would fail
    importer = Importer(driver, 1, lambda finish: finish())
    with Path("/dev/null").open("rb") as file, pytest.raises(UnsupportedError) as caught:
        importer.open(MemoryHandle("hip_pool", bytes(64), 4096, file.fileno()))
    assert caught.value.rule == "memory_kind"
    assert "hip_ipc" in caught.value.fix

"""What only AMD's GPUs have: code objects, LDS, descriptors of memory that runtimes take in two ways; see
``test_gpu.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gpu_device_harness import ADD, GPUS, Gpu, get, stage
from hip_device_cases import UNIT

from tilewright_arch import ArchSpec, from_gcn_arch_name
from tilewright_kit.contract.plan import Pointer, Struct
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import DeviceError
from tilewright_server.devices.hip.device import HipDevice

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kind() -> Gpu:
    return GPUS["hip"]


def test_all_of_the_lds_can_be_used(gpu: HipDevice, entry: Callable[[str], int]) -> None:
    fixed, limit = 64, gpu.info.arch.lds_bytes
    out = gpu.allocate(16)
    args = Struct((Pointer("out"),))
    for nbytes in (1024, limit - fixed):
        gpu.write(out, 0, memoryview(np.array([0, nbytes], np.int64)))
        geometry = {"grid": (1, 1, 1), "block": (256, 1, 1), "shared_bytes": nbytes}
        gpu.program([stage(entry("shared_bytes"), args, **geometry)], ["out"]).run([out.address], 0)
        assert get(gpu, out, np.int64)[0] == nbytes // 4 + fixed // 4
    with pytest.raises(DeviceError) as caught:
        gpu.program([stage(entry("shared_bytes"), args, shared_bytes=limit - fixed + 4)], ["out"])
    assert caught.value.rule == "kernel_geometry"


def test_launches_that_the_device_has_not_are_refused_by_validation(
    gpu: HipDevice, entry: Callable[[str], int]
) -> None:
    for geometry in ({"cluster": (2, 1, 1)}, {"dependent": True}, {"block": (512, 1, 1)}):
        with pytest.raises(DeviceError) as caught:
            gpu.program([stage(entry("add"), ADD, **geometry)], ["x", "y", "out"])
        assert caught.value.rule == "kernel_geometry"
    with pytest.raises(DeviceError, match="more than one parameter"):
        entry("two")


def test_code_of_another_chip_is_refused_before_the_runtime_sees_it(
    gpu: HipDevice, build: Callable[[SourceUnit, ArchSpec], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = gpu.info.arch.toolchain.gpu_arch
    other = "gfx950" if target != "gfx950" else "gfx942"
    binary = build(UNIT, from_gcn_arch_name(other))
    monkeypatch.setattr(gpu._driver.api.raw, "hipModuleLoadData", lambda data: pytest.fail("the runtime saw it"))
    with pytest.raises(DeviceError, match=f"it is for {other}, and this is {target}") as caught:
        gpu.load(binary)
    assert caught.value.rule == "module_load"
    assert caught.value.fix

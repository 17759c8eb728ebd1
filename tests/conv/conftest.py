"""Makes the helpers of this folder importable for its tests, and gives them archs, a device and built kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.device import DeviceInfo

sys.path.insert(0, str(Path(__file__).parent))

from conv_runner import ConvRunner, compiler


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arch_name" in metafunc.fixturenames:
        metafunc.parametrize("arch_name", tilewright_arch.names())


@pytest.fixture
def arch(arch_name: str) -> ArchSpec:
    """Every architecture that has a spec, in turn."""
    return tilewright_arch.load(arch_name)


@pytest.fixture(scope="session")
def cpu() -> ArchSpec:
    """The level of the machine that runs the tests."""
    return tilewright_arch.detect_cpu()


@pytest.fixture(scope="session")
def device(cpu: ArchSpec) -> DeviceInfo:
    return DeviceInfo("cpu:0", "cpu", "test machine", cpu, 2, 1 << 32)


@pytest.fixture(scope="session")
def conv_runner(cpu: ArchSpec, tmp_path_factory: pytest.TempPathFactory) -> ConvRunner:
    """Builds kernels and runs plans on this machine."""
    return ConvRunner(cpu, compiler(), tmp_path_factory.mktemp("kernels"))

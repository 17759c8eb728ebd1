"""Fixtures for tests of operations, to be imported by their ``conftest.py``: archs, and the device of this machine."""

from __future__ import annotations

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.contract.device import DeviceInfo

__all__ = ["arch", "cpu", "device", "pytest_generate_tests"]


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

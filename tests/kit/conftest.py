"""Makes ``toy`` importable for the tests of this folder, and gives them archs and a device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.device import DeviceInfo

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def arch() -> ArchSpec:
    return tilewright_arch.load("x86-64-v3")


@pytest.fixture(scope="session")
def device(arch: ArchSpec) -> DeviceInfo:
    return device_of(arch)

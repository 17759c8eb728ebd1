"""Makes ``gemm_runner`` importable for the tests of this folder, and gives them archs, a device and built kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilewright_arch import ArchSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parent))

from gemm_runner import Runner, compiler
from kernel_fixtures import arch, cpu, device, pytest_generate_tests  # noqa: F401


@pytest.fixture(scope="session")
def runner(cpu: ArchSpec, kernel_folder: Path) -> Runner:  # noqa: F811
    """Builds kernels and runs plans on this machine."""
    return Runner(cpu, compiler(), kernel_folder)

"""Makes the helpers of this folder importable for its tests, and gives them archs and a device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilewright_arch import ArchSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parent))

from cpu_kernels import compiler
from fmha_runner import FmhaRunner
from kernel_fixtures import arch, cpu, device, pytest_generate_tests  # noqa: F401


@pytest.fixture(scope="session")
def fmha_runner(cpu: ArchSpec, kernel_folder: Path) -> FmhaRunner:  # noqa: F811
    """Builds kernels and runs plans on this machine."""
    return FmhaRunner(cpu, compiler(), kernel_folder)

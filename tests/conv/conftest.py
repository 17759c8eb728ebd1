"""Makes the helpers of this folder importable for its tests, and gives them archs, a device and built kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilewright_arch import ArchSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parent))

from conv_runner import ConvRunner, compiler
from kernel_fixtures import arch, cpu, device, pytest_generate_tests  # noqa: F401


@pytest.fixture(scope="session")
def conv_runner(cpu: ArchSpec, kernel_folder: Path) -> ConvRunner:  # noqa: F811
    """Builds kernels and runs plans on this machine."""
    return ConvRunner(cpu, compiler(), kernel_folder)

"""Makes the helpers of this folder importable, and gives tests archs, a device and built kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilewright_arch import ArchSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1] / "gemm"))
sys.path.insert(0, str(Path(__file__).parent))

from gemm_runner import compiler
from kernel_fixtures import arch, cpu, device, pytest_generate_tests  # noqa: F401
from moe_runner import MoeRunner


@pytest.fixture(scope="session")
def runner(cpu: ArchSpec, kernel_folder: Path) -> MoeRunner:  # noqa: F811
    """Builds kernels and runs plans on this machine."""
    return MoeRunner(cpu, compiler(), kernel_folder)

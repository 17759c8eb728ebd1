"""Makes the helpers of this folder importable for its tests, and gives them archs, a device and built kernels."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from tilewright_arch import ArchSpec
from tilewright_emulator.code import compiler as amd
from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.hip import HipToolchain

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parent))

from conv_runner import ConvRunner, compiler
from kernel_fixtures import arch, cpu, device, pytest_generate_tests  # noqa: F401


@pytest.fixture(scope="session")
def conv_runner(cpu: ArchSpec, kernel_folder: Path) -> ConvRunner:  # noqa: F811
    """Builds kernels and runs plans on this machine."""
    return ConvRunner(cpu, compiler(), kernel_folder)


@pytest.fixture(scope="session")
def hip_toolchain() -> HipToolchain:
    """A compiler whose code objects the emulator reads: without llvm-objdump it keeps their listing."""
    listed = None if amd.have_objdump() else amd.compiler(Path(tempfile.mkdtemp()))
    found = HipToolchain([include_dir()], compiler=listed[0] if listed else "")
    try:
        found.identity()
    except ToolchainMissingError:
        pytest.skip(f"needs {amd.MISSING}")
    return found

"""The simulated HIP runtime: how it is built, and the environment of processes that are to use it."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright_emulator.code.compiler import MISSING, compiler

__all__ = ["ARCHS", "TAG", "build", "environment", "library", "marks"]

HERE = Path(__file__).parent
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
TAG = f"h{os.getpid() % 10**7}"
"""Tells this process's shared memory from that of others."""


_CLANG = compiler(Path(tempfile.mkdtemp()))
"""The simulated hiprtc calls it."""

marks = [
    pytest.mark.skipif(
        importlib.util.find_spec("hip") is None, reason="hip-python is not installed: pip install 'tilewright[hip]'"
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
    pytest.mark.skipif(_CLANG is None, reason=f"needs {MISSING}"),
]


def build(folder: Path, *flags: str) -> Path:
    """The libraries, under the names that hip-python and others look for. Returns ``folder``."""
    for name, soname in (("amdhip64", "libamdhip64.so.7"), ("hiprtc", "libhiprtc.so.7")):
        source = HERE / "hip_simulated" / f"lib{name}.c"
        usual = ["-O1", "-shared", "-fPIC", f"-Wl,-soname,{soname}"]
        subprocess.run(["cc", *usual, *flags, "-o", str(folder / soname), str(source), "-lpthread", "-lrt"], check=True)
        (folder / f"lib{name}.so").symlink_to(soname)
    return folder


def environment(folder: Path, arch: str = "gfx942", *, emulator: bool = True, **more: str) -> dict[str, str]:
    """Variables of processes that see simulated devices: one for each arch of the list."""
    command = f"'{sys.executable}' -m tilewright_emulator.serve"
    return {
        "LD_LIBRARY_PATH": str(folder),
        "TW_SIMULATED_HIP": str(folder / "libamdhip64.so"),
        "TW_SIM_TAG": TAG,
        "TW_SIM_ARCH": arch,
        "TW_SIM_CLANG": shlex.join(_CLANG or ()),
        "TW_SIM_DEVICES": str(len(arch.split(","))),
        **({"TW_SIM_EMULATOR": command} if emulator else {}),
        **more,
    }


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the libraries. What processes that died left in shared memory goes in the end."""
    yield build(tmp_path_factory.mktemp("simulated_hip"))
    for left in Path("/dev/shm").glob(f"tw{TAG}-*"):
        left.unlink(missing_ok=True)

"""The tests of the CUDA device and the conformance suite against a simulated driver, for machines without a GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
have_packages = (
    importlib.util.find_spec("nvidia") is not None
    and importlib.util.find_spec("cuda") is not None
    and importlib.util.find_spec("cuda.bindings") is not None
)
pytestmark = [
    pytest.mark.skipif(not have_packages, reason="NVIDIA's packages are not installed: pip install 'tilewright[cuda]'"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
]


TAG = f"{os.getpid() % 10**8}"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("simulated") / "libcuda.so.1"
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(
        ["cc", *flags, "-o", str(path), str(HERE / "cuda_simulated" / "libcuda.c"), "-lpthread", "-lrt"], check=True
    )
    yield path
    for left in Path("/dev/shm").glob(f"tw{TAG}-*"):
        left.unlink(missing_ok=True)


def simulated(library: Path, **more: str) -> dict[str, str]:
    """The environment of processes that see two simulated devices."""
    driver = {"LD_LIBRARY_PATH": str(library.parent), "TW_SIMULATED_CUDA": str(library)}
    return {**os.environ, **driver, "TW_SIM_TAG": TAG, "TW_SIM_DEVICES": "2", **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "least"),
    [
        ("test_gpu_packets.py", 15),
        pytest.param("test_conformance.py", 28, marks=pytest.mark.extended),
        pytest.param("test_gpu*.py", 48, marks=pytest.mark.extended),
        pytest.param("test_cuda.py", 6, marks=pytest.mark.extended),
        pytest.param("test_cuda_plans.py", 12, marks=pytest.mark.extended),
    ],
)
def test_suite_passes_with_a_simulated_driver(suite: str, least: int, library: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        *map(str, sorted(HERE.glob(suite))),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, env=simulated(library), timeout=280)
    assert answer.returncode == 0, answer.stdout[-8000:] + answer.stderr[-8000:]
    passed = answer.stdout.rpartition(" passed")[0].rpartition("\n")[2].split()[-1]
    assert int(passed) >= least, answer.stdout[-2000:]


def diagnosis(library: Path, **more: str) -> str:
    script = (
        f"from tilewright_server.devices.cuda import discovery; discovery._LIBRARIES = ({str(library)!r},);"
        "from tilewright_server.devices.cuda.provider import CudaProvider as P;"
        "p = P(); print([i.id for i in p.discover()], dict(p.diagnose()))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=simulated(library, **more), timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_driver_that_is_too_old_is_said_so(library: Path) -> None:
    assert "['cuda:0', 'cuda:1']" in diagnosis(library)
    old = diagnosis(library, TW_SIM_DRIVER="12080")
    assert "[]" in old
    assert "CUDA 12.8" in old
    assert "580" in old


def test_visible_devices_are_respected(library: Path) -> None:
    hidden = diagnosis(library, CUDA_VISIBLE_DEVICES="")
    assert "[]" in hidden
    assert "CUDA_VISIBLE_DEVICES" in hidden

"""Sweeps on a GPU whose driver is simulated: all but the kernels' own work, which leaves outputs as they were."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.measure.timing import TimingOptions

DRIVER = Path(__file__).parents[1] / "devices" / "cuda_simulated" / "libcuda.c"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("cuda") is None,
        reason="NVIDIA's packages are not installed: pip install 'tilewright[cuda]'",
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulated") / "libcuda.so.1"
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *flags, "-o", str(path), str(DRIVER), "-lpthread", "-lrt"], check=True)
    return path


@pytest.fixture
def gpu(library: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    from tilewright_server.devices.cuda import discovery

    tag = f"s{os.getpid() % 10**6}"
    monkeypatch.setattr(discovery, "_LIBRARIES", discovery._LIBRARIES)  # the plugin changes it
    monkeypatch.setenv("TW_SIMULATED_CUDA", str(library))
    monkeypatch.setenv("TW_SIM_TAG", tag)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, "simulated_search", raising=False)
    yield Setup(str(cache_dir), modules=("simulated_search",))
    for left in Path("/dev/shm").glob(f"tw{tag}-*"):
        left.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(128, 256, 192, "bf16"),
        Case(8, 256, 192, "fp8", out_dtype="bf16"),
        Case(33, 65, 70, "fp16", "ccr", bias="yes", activation="Gelu"),
        Case(64, 64, 64, "int8", batch=3),
    ],
    ids=lambda case: case.label,
)
@pytest.mark.some(1)
@pytest.mark.extended
def test_kernels_are_built_loaded_and_timed_on_operands_in_turns(make_sweep: Any, gpu: Setup, case: Case) -> None:
    timing = TimingOptions(warmup=1, repeat=3, rotating=3, seconds=0.1)
    sweep = make_sweep(gpu, device="cuda:0", limit=2, check=False, timing=timing, finalists=0)
    results = list(sweep.run([case]))
    assert [(item.status, item.reason) for item in results] == [("ok", "")] * 2
    assert all(item.median_ns > 0 and item.build_ms >= 0 and "NVRTC" in item.toolchain for item in results)
    assert results[0].stamp.conditions["rotating"] == 3
    assert results[0].stamp.driver.startswith("CUDA")
    assert results[0].stamp.device == "Simulated H200"


def test_kernels_that_write_nothing_are_found_out(make_sweep: Any, gpu: Setup) -> None:
    sweep = make_sweep(gpu, device="cuda:0", limit=1)
    small, large = sweep.run([Case(64, 64, 64, "bf16"), Case(640, 640, 640, "bf16")])
    assert (small.status, large.status) == ("wrong", "wrong")
    assert f"{64 * 64} unwritten" in small.reason
    assert "unwritten" in large.reason


@pytest.mark.extended
def test_confirmation_takes_no_more_of_a_gpu_than_its_share(gpu: Setup, tmp_path: Path) -> None:
    """One hundredth of the time that passes, what was saved up and the launch under way apart."""
    import time

    from tilewright_server.engine.call import Call
    from tilewright_server.engine.measurements.database import PerfDatabase
    from tilewright_server.engine.types import Selection
    from tilewright_server.hosting.confirmation.budget import Budget
    from tilewright_server.hosting.confirmation.confirmation import Confirmation
    from tilewright_server.hosting.confirmation.hot_problems import HotProblem

    engine, share = gpu.engine(), 0.01
    try:
        request = Case(64, 64, 64, "bf16").request()
        prepared = engine.plan(request, Selection(device="cuda:0"), Call())
        problem = HotProblem(request, Selection(device="cuda:0"), "cuda:0", prepared.kernel_counters)
        begun, budget = time.monotonic(), Budget(share, 60)
        confirming = Confirmation(engine, PerfDatabase(tmp_path / "perf.sqlite"), budget, lambda: None)
        assert confirming.confirm(problem)
        passed = time.monotonic() - begun
        assert 0 < budget.spent_s <= share * passed + 0.05 + 0.05
    finally:
        engine.close()

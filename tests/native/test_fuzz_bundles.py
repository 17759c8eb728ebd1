"""Mutated bundles and launch plans, opened by a libtilewright that is built with sanitizers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from sanitized_runtime import build, gpu_bundle, simulated_driver

import tilewright_arch
from tilewright_tools.cli import main

SHAPES = ["--gemm", "64x48x32", "--conv", "2x6x8x9x7:3s1p1g1", "--attention", "1x2x33x40", "--dtype", "fp32"]
NO_GPU = importlib.util.find_spec("nvidia") is None or shutil.which("cc") is None


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kind", ["cpu", pytest.param("gpu", marks=pytest.mark.skipif(NO_GPU, reason="no NVRTC, or no C compiler (cc)"))]
)
@pytest.mark.parametrize(
    "count", [pytest.param(1500, marks=pytest.mark.extended), pytest.param(100_000, marks=pytest.mark.exhaustive)]
)
def test_mutated_bundles_and_plans_break_no_rule_of_memory(
    tmp_path: Path, kernel_cache: Path, count: int, kind: str
) -> None:
    environment = {"PATH": os.environ["PATH"], "ASAN_OPTIONS": "detect_leaks=1"}
    if kind == "gpu":  # with plans of a CPU beside those of the GPU, whose driver is simulated and leaks
        bundle = gpu_bundle(tmp_path, kernel_cache, "--arch", tilewright_arch.detect_cpu().id)
        environment |= {"LD_LIBRARY_PATH": str(simulated_driver(tmp_path / "driver")), "TW_SIM_TAG": str(os.getpid())}
        environment |= {"ASAN_OPTIONS": "detect_leaks=0"}
    else:
        bundle = tmp_path / "model.twb"
        assert main(["bundle", "build", *SHAPES, "--cache-dir", str(kernel_cache), "-o", str(bundle)]) == 0
    driver = build(tmp_path, "fuzz_bundles.cpp", "address,undefined")
    done = subprocess.run(
        [str(driver), str(bundle), str(count), "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "opened" in done.stdout and "refused" in done.stdout
    assert ("launched" in done.stdout) == (kind == "gpu")

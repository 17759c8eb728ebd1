"""libtilewright's part for GPUs over the simulated driver: plain, and with sanitizers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from sanitized_runtime import build, build_plain, gpu_bundle, simulated_driver

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="no NVRTC: pip install 'tilewright[cuda]'"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)"),
]
OPTIONS = {
    "": {},
    "address,undefined": {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=1"},
}
"""The simulated driver leaks what it makes."""


@pytest.mark.parametrize(
    "sanitizers", ["", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("address,undefined", "thread"))]
)
def test_plans_are_launched_in_all_ways_and_foreign_streams_and_contexts_refused(
    tmp_path: Path, kernel_cache: Path, sanitizers: str
) -> None:
    source = "launch_gpu.cpp"
    program = build(tmp_path, source, sanitizers) if sanitizers else build_plain(tmp_path, source)
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(simulated_driver(tmp_path / "driver"))}
    environment |= {"TW_SIM_DEVICES": "2", "TW_SIM_TAG": f"n{os.getpid() % 10**6}", **OPTIONS[sanitizers]}
    done = subprocess.run(
        [str(program), str(gpu_bundle(tmp_path, kernel_cache)), "4", "20"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("4 plans, counted 8")

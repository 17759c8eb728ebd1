"""libtilewright over the machine's own driver: every way to launch, contexts that are gone, streams of other ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "native"))

from sanitized_runtime import build_plain, gpu_bundle


def test_plans_are_launched_in_all_ways_and_foreign_streams_and_contexts_refused(torch: Any, tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    bundle = gpu_bundle(tmp_path, tmp_path / "cache", arch="sm_90a" if major == 9 else f"sm_{major}{minor}")
    program = build_plain(tmp_path, "launch_gpu.cpp")
    done = subprocess.run(
        [str(program), str(bundle), "4", "20"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("4 plans, counted 8")

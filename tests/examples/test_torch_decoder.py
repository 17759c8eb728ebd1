"""The example that decodes with PyTorch's operations and with Tilewright's."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_decoder.py"
SMALL = "--device cpu --dtype float32 --layers 2 --width 256 --context 70 --batches 3 --seconds 0.01 --no-compile"


@pytest.mark.extended
@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("gate", ["fused", "joined"])
def test_both_decoders_agree(tmp_path: Path, gate: str) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, str(EXAMPLE), *SMALL.split(), "--gate", gate]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"least cosine ([0-9.]+)", done.stdout)
    assert found is not None and float(found[1]) > 0.9999

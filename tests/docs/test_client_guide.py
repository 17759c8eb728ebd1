"""The snippets of the guides for users run, in order, against a server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright_tools.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("guide")
    flags = ["--listen", f"unix:{folder}/s", "--cache-dir", str(kernel_cache), "--log-level", "warning"]
    command = [sys.executable, "-m", "tilewright_tools.cli", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("ready")
        yield f"unix:{folder}/s"
        server.terminate()


@pytest.mark.parametrize(
    "guide", ["client.md", "convolution.md", "attention.md", "moe.md", "launching.md", "pytorch.md"]
)
@pytest.mark.extended
def test_every_snippet_runs(target: str, guide: str, tmp_path: Path, kernel_cache: Path) -> None:
    if guide == "pytorch.md":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    snippets = SNIPPET.findall((DOCS / guide).read_text("utf-8"))
    assert snippets
    if guide == "launching.md":  # its snippets load a bundle
        (tmp_path / "shapes.csv").write_text("m,n,k,layout\n64,48,32,rrr\n")
        shapes = ["--gemm", f"{tmp_path}/shapes.csv", "--dtype", "fp32", "--cache-dir", str(kernel_cache)]
        assert main(["bundle", "build", *shapes, "-o", f"{tmp_path}/model.twb"]) == 0
    environment = {**os.environ, "TILEWRIGHT_TARGET": target}
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", "\n".join(snippets)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr

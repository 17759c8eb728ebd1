"""The wheel and the source distribution, built once for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build one kind of distribution with the project's own backend, a development package: no network is needed."""

    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (artifact,) = folder.iterdir()
        return artifact

    return make


@pytest.fixture(scope="session")
def wheel(build: Callable[[str], Path]) -> Path:
    return build("wheel")


@pytest.fixture(scope="session")
def sdist(build: Callable[[str], Path]) -> Path:
    return build("sdist")

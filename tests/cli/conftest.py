"""Commands, run in this process or in one of their own, against one server for all tests that want no other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tilewright_tools.cli import main
from tilewright_tools.cli.private_server import PrivateServer


@dataclass(frozen=True)
class Ran:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        code = main([str(item) for item in arguments])
        out, err = capfd.readouterr()
        return Ran(int(code), out, err)

    return run


@pytest.fixture
def process() -> Run:
    """Run a command in a process of its own."""

    def run(*arguments: object, timeout: float = 120, stdin: str = "") -> Ran:
        command = [sys.executable, "-m", "tilewright_tools.cli", *map(str, arguments)]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout)
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def cache_dir(kernel_cache: Path) -> Path:
    """Where the server builds; a module that looks into it has one of its own (``own_target``)."""
    return kernel_cache


@pytest.fixture(scope="session")
def target(kernel_cache: Path) -> Iterator[str]:
    """Where the server of these tests listens."""
    with PrivateServer(["--cache-dir", str(kernel_cache)]) as found:
        yield found


@pytest.fixture(scope="module")
def own_target(cache_dir: Path) -> Iterator[str]:
    """Where a server listens that only the tests of a module have; it builds in their ``cache_dir``."""
    with PrivateServer(["--cache-dir", str(cache_dir)]) as found:
        yield found

"""Compilers that misbehave on demand, and small things to compile."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_native import include_dir
from tilewright_server.build.cache.artifacts import ArtifactCache
from tilewright_server.build.pool import BuildPool, PoolOptions
from tilewright_server.build.toolchains.toolchain import CpuToolchain
from tilewright_server.build.workers.process import Limits

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path: their helpers are found here

GOOD = 'extern "C" __attribute__((visibility("default"))) int answer() { return NUMBER; }\n'


@pytest.fixture(scope="session")
def arch() -> ArchSpec:
    return tilewright_arch.detect_cpu()


@pytest.fixture
def unit() -> Callable[..., SourceUnit]:
    def make(number: int = 42, **changes: object) -> SourceUnit:
        record = {
            "name": f"answer_{number}",
            "language": "c++",
            "text": GOOD.replace("NUMBER", str(number)),
            "entries": {"main": "answer"},
            "plugin_version": "1",
        }
        return SourceUnit(**{**record, **changes})  # type: ignore[arg-type]

    return make


@dataclass
class FakeCompiler:
    """A shell script in a compiler's place. ``calls`` counts the compilations, in all processes."""

    path: Path
    counter: Path

    def behave(self, body: str, version: str = "fake 1.0") -> None:
        script = (
            f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n'
            f"echo called >> {self.counter}\n"
            'for last; do :; done; out="$last"\n'
            f"{body}\n"
        )
        # A new file each time: one that is being executed cannot be written to.
        fresh = self.path.with_suffix(".new")
        fresh.write_text(script)
        fresh.chmod(0o755)
        fresh.replace(self.path)

    @property
    def calls(self) -> int:
        return len(self.counter.read_text().splitlines()) if self.counter.exists() else 0


@pytest.fixture
def fake(tmp_path: Path) -> FakeCompiler:
    """Passes everything on to the real compiler until told otherwise."""
    compiler = FakeCompiler(tmp_path / "fake-c++", tmp_path / "calls")
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("no system C++ compiler")
    compiler.behave(f'exec {real} "$@"')
    return compiler


@pytest.fixture
def fake_toolchain(fake: FakeCompiler) -> CpuToolchain:
    return CpuToolchain([include_dir()], compiler=str(fake.path), limits=Limits(timeout_s=20.0))


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


@pytest.fixture
def pool(cache: ArtifactCache, fake_toolchain: CpuToolchain) -> Iterator[BuildPool]:
    pool = BuildPool(cache, {"c++": fake_toolchain}, PoolOptions(workers=2))
    yield pool
    pool.close()

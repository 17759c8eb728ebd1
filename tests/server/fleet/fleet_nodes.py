"""Servers of a fleet, as far as builds go: a cache and a pool each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_server.build.cache.artifacts import ArtifactCache
from tilewright_server.build.pool import BuildPool
from tilewright_server.build.toolchains.toolchain import Compiled
from tilewright_server.engine.call import Call
from tilewright_server.hosting.fleet.fleet import Fleet
from tilewright_server.hosting.fleet.kernels import QUEUE, SharedKernels
from tilewright_server.hosting.fleet.seal import Seal
from tilewright_server.hosting.fleet.store import Store

UNIT = SourceUnit("k", "c++", "int k();", {"main": "k"}, (), "1")
ARCH = tilewright_arch.detect_cpu()


@dataclass
class CountedCompiler:
    """A compiler whose binaries are the source's text and how many there were."""

    made: list[bytes] = field(default_factory=list)
    job_bytes: int = 1
    source_suffix: str = ".cpp"
    binary_suffix: str = ".so"

    class headers:
        @staticmethod
        def closure(text: str) -> str:
            return ""

    def identity(self) -> str:
        return "counted 1"

    def flags(self, unit: SourceUnit, arch: ArchSpec) -> tuple[str, ...]:
        return ("-O2",)

    def compile(self, unit: SourceUnit, workdir: Path, arch: ArchSpec, abort: object = None) -> Compiled:
        self.made.append(f"{unit.text} {len(self.made)}".encode())
        (workdir / "k.so").write_bytes(self.made[-1])
        return Compiled(workdir / "k.so", "log", 0.001)

    def close(self) -> None:
        pass


class Node:
    """A server: its cache, its pool, its part of the fleet."""

    def __init__(self, folder: Path, store: Store, seal: Seal | None = None, **options: Any) -> None:
        self.cache = ArtifactCache(folder / "cache")
        self.compiler = CountedCompiler()
        self.pool = BuildPool(self.cache, {"c++": self.compiler})  # type: ignore[dict-item]
        self.kernels = SharedKernels(self.cache, store, seal or Seal(), **{"queue": QUEUE, **options})
        self.pool.shared = self.fleet = Fleet(store, self.kernels, None)

    def build(self, unit: SourceUnit = UNIT) -> str:
        """The state in which a build ended."""
        build = self.pool.submit(unit, ARCH)
        build.wait(Call.within(60))
        return build.state

    def binary(self, unit: SourceUnit = UNIT) -> bytes:
        artifact = self.cache.get(self.pool.key(unit, ARCH))
        assert artifact is not None
        try:
            return artifact.binary.read_bytes()
        finally:
            artifact.release()

    def count(self, result: str) -> int:
        return self.fleet.state().objects["kernel", result]

    def close(self) -> None:
        self.fleet.close()
        self.pool.close()

"""Plans and operands of the vector operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from plugin_objects import load_plugin
from vector_operation import VectorConfig, VectorPlugin, request

from tilewright_kit.loading.loader import PluginManager
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine, Prepared
from tilewright_server.engine.types import EngineOptions, Selection

BEST = VectorConfig(rank=1).name
TWO_STAGES = VectorConfig(rank=4, stages=2).name
BROKEN = VectorConfig(rank=9, broken=True).name
TEAM = VectorConfig(rank=8, team=2).name


def call() -> Call:
    return Call.within(60)


class Vectors:
    """Operands of one execution."""

    def __init__(self, n: int, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.x, self.y = generator.random((2, n), np.float32)
        self.out = np.full(n, np.nan, np.float32)

    @property
    def addresses(self) -> list[int]:
        return [array.ctypes.data for array in (self.x, self.y, self.out)]

    def right(self, scale: float = 1.0) -> bool:
        return bool(np.allclose(self.out, self.x + np.float32(scale) * self.y, rtol=1e-6))


def plan(engine: Engine, n: int = 100, selection: Selection | None = None, **attributes: Any) -> Prepared:
    return engine.plan(request(n, **attributes), selection or Selection(), call())


def open_engine(cache: Path, toolchains: Any = None, **options: Any) -> Engine:
    """An engine with the vector operation on the CPU device."""
    plugins = PluginManager()
    load_plugin(plugins, VectorPlugin(), "vector")
    plugins.load_module("tilewright_server.devices.cpu.plugin", "cpu")
    assert not plugins.failures
    return Engine(EngineOptions(**{"cache_dir": cache, **options}), plugins, toolchains)

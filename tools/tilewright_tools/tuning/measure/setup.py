"""Setup of both processes of a sweep: the cache, the plugins and the options of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.types.errors import UnsupportedError
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.types import EngineOptions

__all__ = ["Setup"]


@dataclass(frozen=True, slots=True)
class Setup:
    """How to make an engine that plans, builds and runs like the server does."""

    cache_dir: str
    plugins: tuple[str, ...] = ()
    """Entry points to load; empty: all."""
    disabled_plugins: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    """Further plugins, by import path."""
    compiler: str = ""
    hip_compiler: str = ""
    cpu_arch: str = ""
    cpu_threads: int = 0
    cpu_isolated: bool = False
    build_workers: int = 0
    build_timeout_s: float = 120.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Setup:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        return cls(**values)

    def engine(self) -> Engine:
        """An engine; close it. Raises ``UnsupportedError`` for a module that is no plugin."""
        plugins = PluginManager(self.plugins or None, self.disabled_plugins)
        plugins.load_entry_points()
        for module in self.modules:
            loaded = plugins.load_module(module)
            reason = getattr(loaded, "reason", "")
            if reason:
                raise UnsupportedError(
                    f"the plugin {module} cannot be used: {reason}",
                    field="modules",
                    value=module,
                    rule="plugin",
                    fix="correct the plugin, or leave it out",
                )
        options = EngineOptions(
            cache_dir=Path(self.cache_dir),
            compiler=self.compiler,
            hip_compiler=self.hip_compiler,
            cpu_arch=self.cpu_arch,
            cpu_threads=self.cpu_threads,
            cpu_isolated=self.cpu_isolated,
            build_workers=self.build_workers,
            build_timeout_s=self.build_timeout_s,
        )
        return Engine(options, plugins)

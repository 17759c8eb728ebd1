"""Plugins that tests make, loaded as installed ones are: through an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright_kit.loading.loader import LoadedPlugin, PluginFailure, PluginManager

__all__ = ["load_plugin"]


class _Distribution:
    def __init__(self, name: str, version: str) -> None:
        self.metadata: Mapping[str, str] = {"Name": name, "Version": version}


class _Point:
    """An entry point whose object is there."""

    def __init__(self, name: str, plugin: object, dist: _Distribution | None) -> None:
        self.name, self.dist, self._plugin = name, dist, plugin

    def load(self) -> object:
        return self._plugin


def load_plugin(
    manager: PluginManager, plugin: object, name: str, distribution: str = "", version: str = ""
) -> LoadedPlugin | PluginFailure:
    """Load an object that has hook implementations."""
    failures = len(manager.failures)
    point: Any = _Point(name, plugin, _Distribution(distribution, version) if distribution else None)
    manager.load_entry_points([point])
    return manager.failures[-1] if len(manager.failures) > failures else manager.loaded[-1]

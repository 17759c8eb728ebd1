"""A server of the real engine with attention, installed or not."""

from __future__ import annotations

import sys

from tilewright_kit.plugins import PluginManager
from tilewright_server import settings
from tilewright_server.app import Application

PLUGINS = {"cpu": "tilewright_server.devices.cpu.plugin", "fmha": "tilewright_fmha.plugin"}


class AttentionServer(Application):
    def load_plugins(self) -> PluginManager:
        plugins = PluginManager(self.settings.plugins or None, self.settings.disabled_plugins)
        for name, module in PLUGINS.items():
            plugins.load_module(module, name)
        return plugins


if __name__ == "__main__":
    sys.exit(AttentionServer(settings.load()).run())

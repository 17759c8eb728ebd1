"""A server of the real engine with the CPU and operations of this repository, installed or not.

The arguments are their plugins: ``gemm``, ``grouped_conv``, ``fmha``.
"""

from __future__ import annotations

import sys

from tilewright_kit.loading.loader import PluginManager
from tilewright_server import settings
from tilewright_server.app import Application

PLUGINS = {
    "cpu": "tilewright_server.devices.cpu.plugin",
    **{operation: f"tilewright_{operation}.plugin" for operation in sys.argv[1:]},
}


class OperationServer(Application):
    def load_plugins(self) -> PluginManager:
        plugins = PluginManager(self.settings.plugins or None, self.settings.disabled_plugins)
        for name, module in PLUGINS.items():
            plugins.load_module(module, name)
        return plugins


if __name__ == "__main__":
    sys.exit(OperationServer(settings.load()).run())

"""Every setting of the server, in one table, and its value from file, environment and flags."""

from tilewright_server.settings.loading import (
    default_cache_dir,
    default_listen,
    default_perf_database,
    listen_of_environment,
    load,
)
from tilewright_server.settings.table import ENV_PREFIX, TABLE, Setting, Settings

__all__ = [
    "ENV_PREFIX",
    "TABLE",
    "Setting",
    "Settings",
    "default_cache_dir",
    "default_listen",
    "default_perf_database",
    "listen_of_environment",
    "load",
]

"""A plugin that has the search for GPUs look at the library that ``TW_SIMULATED_CUDA`` names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tilewright_kit.loading.hookspecs import hookimpl
from tilewright_server.devices.cuda import discovery

discovery._LIBRARIES = (os.environ["TW_SIMULATED_CUDA"],)


@hookimpl
def tilewright_measurements() -> Sequence[Path]:
    return ()

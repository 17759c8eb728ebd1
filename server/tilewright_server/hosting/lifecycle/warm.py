"""The warm start of a server, as its settings say."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from tilewright_server.engine.engine import Engine
from tilewright_server.engine.planning.warm_start import bundle_problems, journal_problems, warm_start
from tilewright_server.protocol.signatures import read_trusted
from tilewright_server.settings import Settings

__all__ = ["make_ready"]

log = logging.getLogger("tilewright")


def make_ready(settings: Settings, engine: Engine, wanted: Callable[[], bool]) -> None:
    """Plan, build and load what the settings name, for as long as that is ``wanted``. Raises what reading the files
    raises.
    """
    keys = read_trusted(settings.trusted_keys) if settings.trusted_keys is not None else ()
    problems = bundle_problems(settings.bundle, keys) if settings.bundle is not None else []
    problems += journal_problems(settings.warm) if settings.warm is not None else []
    if not problems:
        return
    begun = time.monotonic()
    workers = settings.build_workers or len(os.sched_getaffinity(0))
    ready, missed = warm_start(engine.plan, engine.devices.infos(), problems, workers, wanted)
    log.info("warm start: %d plans ready, %d not, %.1f s", ready, missed, time.monotonic() - begun)

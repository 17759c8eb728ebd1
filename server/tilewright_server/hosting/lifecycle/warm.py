"""The warm start of a server, as its settings say."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

from tilewright_kit.selection.measured import Measured
from tilewright_kit.types.errors import NotFoundError, TilewrightError
from tilewright_server.endpoints.readiness import Readiness
from tilewright_server.engine.engine import Engine
from tilewright_server.hosting.lifecycle.heap import trim_heap
from tilewright_server.settings import Settings

__all__ = ["load_the_rest", "make_ready", "open_default"]

log = logging.getLogger("tilewright")

RETRY_DEVICE_S = 10.0
"""Time until a default device that could not be opened is tried again."""


def make_ready(settings: Settings, engine: Engine, wanted: Callable[[], bool]) -> None:
    """Plan, build and load what the settings name, for as long as that is ``wanted``. Raises what reading the files
    raises.
    """
    if settings.bundle is None and settings.warm is None and settings.trusted_keys is None:
        return
    from tilewright_server.engine.planning.warm_start import bundle_problems, journal_problems, warm_start
    from tilewright_server.protocol.signatures import read_trusted

    keys = read_trusted(settings.trusted_keys) if settings.trusted_keys is not None else ()
    problems = bundle_problems(settings.bundle, keys) if settings.bundle is not None else []
    problems += journal_problems(settings.warm) if settings.warm is not None else []
    if not problems:
        return
    begun = time.monotonic()
    workers = settings.build_workers or len(os.sched_getaffinity(0))
    ready, missed = warm_start(engine.plan, engine.devices.infos(), problems, workers, wanted)
    log.info("warm start: %d plans ready, %d not, %.1f s", ready, missed, time.monotonic() - begun)


def load_the_rest(engine: Engine, meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Import in the background what a server is ready without: plugins that were only announced, and their models.
    Requests that come earlier, and all of them where there is no thread, load what they need themselves.
    ``meanwhile`` is entered for as long as it takes.
    """
    with suppress(RuntimeError):
        threading.Thread(target=_load, args=(engine, meanwhile), name="plugins", daemon=True).start()


def _load(engine: Engine, meanwhile: Callable[[], AbstractContextManager[None]]) -> None:
    try:
        with meanwhile():
            engine.plugins.finish()
            for strategy in engine.strategies.values():
                if isinstance(strategy, Measured):
                    strategy.prepare()
    except Exception:  # a request that needs it meets the same error
        log.exception("what requests need could not be loaded in advance")
    trim_heap()  # what imports took, a tenth of an idle server


def open_default(engine: Engine, readiness: Readiness, ending: threading.Event) -> None:
    """Open the default device, so that the first request does not wait for it; ready from then on."""
    said = ""
    while not ending.is_set():
        try:
            engine.devices.get(engine.devices.default)
        except NotFoundError as error:  # there is none: what needs no device still works
            log.warning("the default device is not ready: %s", error)
            break
        except TilewrightError as error:
            reason = f"the default device is not ready: {error}"
            if reason != said and not ending.is_set():
                log.warning("%s", reason)
        except Exception as error:
            reason = f"the default device is not ready: {type(error).__name__}"
            if reason != said:
                log.exception("the default device is not ready")
        else:
            break
        said = reason
        readiness.set(reason)
        ending.wait(RETRY_DEVICE_S)
    readiness.set("")

"""The server's own client: asks for its health through the front door, and ends the process if no answer comes.

Whatever holds the server up in a way that nothing else notices (an event thread that waits for ever), whoever watches
the process from outside sees it end, with a reason in its log, instead of a server that is there and answers nobody.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2

__all__ = ["EXIT_STATUS", "Watchdog"]

log = logging.getLogger("tilewright.watchdog")

CHECK = "/grpc.health.v1.Health/Check"
EXIT_STATUS = 70
"""Exit status of a process that its watchdog ended (EX_SOFTWARE)."""
INTERVAL_S = 1.0
OVERSLEPT_S = 1.0
"""Being that late itself, the watchdog was stopped or found no processor, and judges nothing."""
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def _end(reason: str) -> None:
    log.critical("%s; the process ends with status %d", reason, EXIT_STATUS)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(EXIT_STATUS)


class Watchdog:
    """Asks from ``start`` until ``stop``."""

    def __init__(
        self,
        address: str,
        limit_s: float,
        end: Callable[[str], None] = _end,
        alive: Callable[[], None] | None = None,
    ) -> None:
        """Call ``end`` when ``address`` has not answered for ``limit_s`` seconds, ``alive`` after each answer."""
        self._address = address
        self._limit_s = limit_s
        self._end = end
        self._alive = alive
        self._answered = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Raises ``RuntimeError`` if the system refuses its thread."""
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def silent(self) -> bool:
        """No answer came for half of the time after which the process ends."""
        return not self._stopped.is_set() and time.monotonic() - self._answered > max(self._limit_s / 2, 3 * INTERVAL_S)

    def _run(self) -> None:
        interval = min(INTERVAL_S, self._limit_s / 4)
        # A server that answers slowly answers: two checks and the pauses before them fill the limit.
        timeout = self._limit_s / 2 - interval
        with grpc.insecure_channel(self._address, options=OPTIONS) as channel:
            check = channel.unary_unary(CHECK)
            request = health_pb2.HealthCheckRequest().SerializeToString()
            answered = last = time.monotonic()
            while not self._stopped.wait(interval):
                asked = time.monotonic()
                try:
                    check(request, timeout=timeout)
                    failure = ""
                except grpc.RpcError as error:
                    # Any other status is an answer.
                    unanswered = error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
                    failure = f"{error.code().name}: {error.details()}" if unanswered else ""
                except Exception as error:
                    failure = repr(error)
                now = time.monotonic()
                overslept = asked - last > interval + OVERSLEPT_S or now - asked > timeout + OVERSLEPT_S
                last = now
                if not failure or overslept:
                    answered = self._answered = now
                    if not failure and self._alive is not None:
                        self._alive()
                elif now - answered >= self._limit_s and not self._stopped.is_set():
                    self._end(f"no answer to the health check at {self._address} for {self._limit_s:g} s ({failure})")
                    return

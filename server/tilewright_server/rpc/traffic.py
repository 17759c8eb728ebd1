"""Books of gRPC calls: how many, with which end, how long they took; and the log's lines on those worth one."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.engine.client import Client
from tilewright_server.engine.histogram import Histogram

__all__ = ["REQUEST_ID", "Traffic"]

log = logging.getLogger("tilewright.calls")

REQUEST_ID = "x-request-id"
"""Metadata by which a client names its call in the server's log."""
MAX_ID = 64


class Traffic:
    """Thread-safe; nothing that it does waits."""

    def __init__(self, slow_s: float = 0) -> None:
        """Calls that take longer than ``slow_s`` seconds are logged; 0: none is."""
        self.slow_s = slow_s
        self._calls: dict[tuple[str, str], int] = {}
        self._times: dict[str, Histogram] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def calls(self) -> dict[tuple[str, str], int]:
        """Calls that have ended, by method and status code."""
        with self._lock:
            return dict(self._calls)

    def times(self) -> dict[str, Histogram]:
        """Times of calls that were answered with one message, by method."""
        with self._lock:
            return {method: item.copy() for method, item in self._times.items()}

    def ended(
        self,
        method: str,
        code: str,
        ns: int | None,
        client: Client,
        error: TilewrightError | None,
        named: Callable[[], str],
    ) -> None:
        """Count a call that took ``ns`` nanoseconds; None for one that lasts as long as its client wants.

        ``named`` returns the id that the client gave it, for the log.
        """
        with self._lock:
            self._calls[method, code] = self._calls.get((method, code), 0) + 1
            if ns is not None:
                times = self._times.get(method)
                if times is None:
                    times = self._times[method] = Histogram()
                times.observe(ns)
        slow = self.slow_s and ns is not None and ns > self.slow_s * 1e9
        if error is not None or slow or log.isEnabledFor(logging.DEBUG):
            self._log(method, code, ns, client, error, named, slow=bool(slow))

    def _log(
        self,
        method: str,
        code: str,
        ns: int | None,
        client: Client,
        error: TilewrightError | None,
        named: Callable[[], str],
        *,
        slow: bool,
    ) -> None:
        fields: dict[str, object] = {
            "method": method,
            "code": code,
            "client": f"{client.principal}/{client.process}",
            "request": _printable(named()) or f"#{next(self._numbers)}",
        }
        if ns is not None:
            fields["ms"] = round(ns / 1e6, 3)
        if error is not None:
            fields |= {"field": str(error.field), "rule": error.rule}
            log.info("refused: %s", error.reason, extra={"fields": fields})
        elif slow:
            log.warning("slow call", extra={"fields": fields})
        else:
            log.debug("call", extra={"fields": fields})


def _printable(text: str) -> str:
    return "".join(letter for letter in text[:MAX_ID] if letter.isprintable())

"""Books of gRPC calls: how many, with which end, how long they took; and the log's lines on those worth one."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from tilewright_kit.types.errors import TilewrightError
from tilewright_server.clients.client import Client, Priority
from tilewright_server.endpoints.rpc.access.roles import is_audited
from tilewright_server.endpoints.rpc.transport.status import status_of
from tilewright_server.endpoints.rpc.transport.tracing import Tracer
from tilewright_server.engine.histogram import Histogram
from tilewright_server.protocol.request_ids import Named

__all__ = ["AUDIT_LOGGER", "Refusal", "Traffic", "log_refusal"]

log = logging.getLogger("tilewright.calls")
AUDIT_LOGGER = "tilewright.audit"
audit = logging.getLogger(AUDIT_LOGGER)
audit.propagate = False
audit.setLevel(logging.CRITICAL)

LINES, LINES_PER_S = 1000, 50.0
"""Lines of the log on refused calls of one process: so many at once, and then in a second. More would fill a disk."""
MOST_PROCESSES = 1024
"""Processes whose lines are counted."""
DENIED = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error that ended a call, without the error: its traceback would keep the messages that the call had."""

    code: str
    field: str
    rule: str
    reason: str

    @classmethod
    def of(cls, error: TilewrightError) -> Refusal:
        return cls(status_of(error).name, str(error.field), error.rule, error.reason)


class Traffic:
    """Thread-safe; nothing that it does waits."""

    def __init__(self, slow_s: float = 0) -> None:
        """Calls that take longer than ``slow_s`` seconds are logged; 0: none is."""
        self.slow_s = slow_s
        self.tracer: Tracer | None = None
        self._calls: dict[tuple[str, str, Priority], int] = {}
        self._times: dict[tuple[str, Priority], Histogram] = {}
        self._lock = threading.Lock()

    def calls(self) -> dict[tuple[str, str, Priority], int]:
        """Calls that have ended, by method, status code, and the priority of their clients."""
        with self._lock:
            return dict(self._calls)

    def times(self) -> dict[tuple[str, Priority], Histogram]:
        """Times of calls that were answered with one message, by method and priority."""
        with self._lock:
            return {key: item.copy() for key, item in self._times.items()}

    def begun(self, method: str, client: Client, named: Named) -> None:
        """Note in the audit log a call that lasts."""
        if audit.isEnabledFor(logging.INFO):
            self._audit(method, "OK", client, None, named)

    def ended(
        self,
        method: str,
        ns: int | None,
        client: Client,
        refusal: Refusal | None,
        named: Named,
    ) -> None:
        """Count a call that took ``ns`` nanoseconds; None for one that lasts as long as its client wants.

        ``named`` has its id, for the log.
        """
        code = "OK" if refusal is None else refusal.code
        priority = client.priority
        with self._lock:
            calls = self._calls.get((method, code, priority), 0)
            self._calls[method, code, priority] = calls + 1
            if ns is not None:
                times = self._times.get((method, priority))
                if times is None:
                    times = self._times[method, priority] = Histogram()
                times.observe(ns)
        if audit.isEnabledFor(logging.INFO) and (code in DENIED or is_audited(method)):
            self._audit(method, code, client, refusal, named)
        slow = self.slow_s and ns is not None and ns > self.slow_s * 1e9
        if refusal is not None:
            log_refusal(method, refusal, client, named.request, ns)
        elif slow or log.isEnabledFor(logging.DEBUG):
            fields = _fields(method, code, client, named.request, ns)
            if slow:
                log.warning("slow call", extra={"fields": fields})
            else:
                log.debug("call", extra={"fields": fields})

    def _audit(self, method: str, code: str, client: Client, refusal: Refusal | None, named: Named) -> None:
        fields = {
            "principal": client.principal,
            "process": client.process,
            "result": code,
            "request": named.request,
        }
        if refusal is not None:
            fields |= {"rule": refusal.rule, "field": refusal.field}
        audit.info("%s", method, extra={"fields": fields})


class _Lines:
    """Books of lines by process. Thread-safe."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, str], tuple[float, float, int]] = {}
        """Lines that a process may have at once, since when, and how many were left out since its last."""
        self._lock = threading.Lock()

    def take(self, client: Client) -> int:
        """Count a line; returns how many were left out before it, -1 if it is to be left out itself."""
        key = client.principal, client.process
        with self._lock:
            now = time.monotonic()
            left, since, out = self._left.get(key, (float(LINES), now, 0))
            left = min(float(LINES), left + (now - since) * LINES_PER_S)
            if key not in self._left and len(self._left) >= MOST_PROCESSES:
                self._left.clear()
            if left < 1:
                self._left[key] = (left, now, out + 1)
                return -1
            self._left[key] = (left - 1, now, 0)
            return out


_lines = _Lines()


def log_refusal(method: str, refusal: Refusal, client: Client, request: str, ns: int | None = None) -> None:
    """Write the log's line on a request that was refused or failed, unless its process has too many of them."""
    if not log.isEnabledFor(logging.INFO):
        return
    left_out = _lines.take(client)
    if left_out < 0 and not log.isEnabledFor(logging.DEBUG):
        return
    fields = _fields(method, refusal.code, client, request, ns) | {"field": refusal.field, "rule": refusal.rule}
    if left_out > 0:
        fields["left_out"] = left_out
    log.info("refused: %s", refusal.reason, extra={"fields": fields})


def _fields(method: str, code: str, client: Client, request: str, ns: int | None) -> dict[str, object]:
    fields: dict[str, object] = {
        "method": method,
        "code": code,
        "client": f"{client.principal}/{client.process}",
        "request": request,
    }
    if ns is not None:
        fields["ms"] = round(ns / 1e6, 3)
    return fields

"""Calls that outlive their session: what had not begun is made again in a new one, and what the server refused for the
moment is tried again. No I/O; see ``rpc``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tilewright.errors import (
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
    is_unbound,
    outcome_unknown,
)
from tilewright.session.state import Core
from tilewright.transport.rpc import Flow, Renew, Rpc, Step, Wait, Work

__all__ = ["PATIENCE_S", "Patience", "surviving"]

T = TypeVar("T")

PATIENCE_S = 10.0
"""How long refusals are waited out in all."""
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
REFUSALS = frozenset({"quota", "queue_full", "shutdown", "request_time", "device_starting", "device_worker"})
"""Rules of errors that come before anything has begun."""


class Patience:
    """Pauses between attempts: longer and longer, never in step with other clients', and with an end."""

    def __init__(self, limit: float | None, tries: int) -> None:
        self._end = time.monotonic() + (PATIENCE_S if limit is None else min(limit, PATIENCE_S))
        self._left = tries
        self._pause = FIRST_PAUSE_S

    def next(self, least: float) -> float | None:
        """Seconds to wait, at least ``least``; ``None`` if it is not worth it any more."""
        pause = max(least, self._pause) * random.uniform(1.0, 1.25)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        self._left -= 1
        return None if self._left < 0 or time.monotonic() + pause > self._end else pause

    def before_opening(self, error: ResourceExhaustedError) -> float | None:
        """Seconds to wait before a session that was refused is asked for again; ``None`` if it is not worth it.

        A quota of sessions is not waited out: those that fill it may stay for hours.
        """
        return self.next(error.retry_after or 0.0) if error.rule != "quota" and _is_refused(error) else None


def surviving(core: Core, make: Callable[[], Flow[T]], limit: float | None, patience: float) -> Flow[T]:
    """Run the flow that ``make`` makes, to its end, in one session or in several.

    A flow that ends with an error that came before anything had begun is made again: in a new session, if its own is
    over and the client may open another (for ``limit`` seconds, the call's own, and ``patience`` at the most), or after
    the time that the server asked for, if it was refused, or at once, but only once, if the server did not know its
    binding, which whoever launched it has forgotten by then. Raises what the flow raises otherwise; for a call that had
    begun that is ``UnknownOutcomeError``.
    """
    waits = Patience(limit, core.retries)
    end: float | None = None
    bound_again = False
    while True:
        begun = False
        flow = make()
        try:
            step = next(flow)
            while True:
                try:
                    reply = yield step
                except TilewrightError as error:  # noqa: PERF203
                    pause = waits.next(error.retry_after or 0.0) if _is_held_up(step, error) else None
                    if pause is not None:
                        yield Wait(pause)
                        continue
                    begun = begun or (_has_effect(step) and not _is_unbegun(error))
                    step = flow.throw(error)
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    begun = begun or (_has_effect(step) and _took_effect(reply))
                    step = flow.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except TilewrightError as error:
            failure = error
        if failure.repeatable and not core.closed:
            if begun:
                raise outcome_unknown(failure.message) from None
            if not core.reconnects:
                raise failure
            now = time.monotonic()
            if end is None:
                end = now + (patience if limit is None else min(limit, patience))
            elif now > end:
                raise failure
            yield from _renewed(core, end)
        elif not begun and (_is_refused(failure) or _is_reopened(failure)):
            pause = waits.next(failure.retry_after or 0.0)
            if pause is None:
                raise failure
            yield Wait(pause)
            yield Renew(PATIENCE_S)
        elif not begun and not bound_again and is_unbound(failure):
            bound_again = True
        else:
            raise failure


def _renewed(core: Core, end: float) -> Flow[None]:
    """A session, opened again and again until ``end`` if nobody answers."""
    pause = FIRST_PAUSE_S
    while True:
        try:
            yield Renew(max(end - time.monotonic(), 0.1))
        except (UnavailableError, ResourceExhaustedError) as error:
            wait = max(pause, error.retry_after or 0.0) * random.uniform(1.0, 1.25)
            if core.closed or error.rule in ("fork_support", "client_open") or time.monotonic() + wait > end:
                raise
        else:
            return
        yield Wait(wait)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _has_effect(step: Step) -> bool:
    """True if it shows whether a step was made twice."""
    return (isinstance(step, Rpc) and step.method.effect) or (isinstance(step, Work) and step.effect)


def _took_effect(reply: Any) -> bool:
    """True unless every execution of a reply was refused."""
    results = getattr(reply, "results", ())
    return not results or not all(item.HasField("error") and item.error.rule in REFUSALS for item in results)


def _is_refused(error: TilewrightError) -> bool:
    """True if the server did nothing, and may do it later."""
    if not isinstance(error, (ResourceExhaustedError, UnavailableError)) or error.rule not in REFUSALS:
        return False
    if error.retry_after is None and error.rule != "shutdown":
        return False
    return error.field != "unread_bytes"  # a reply that is too much was made already


def _is_reopened(error: TilewrightError) -> bool:
    """True if a device is being opened again, without which nothing had begun."""
    return error.rule == "device_lost" and error.retry_after is not None


def _is_unbegun(error: TilewrightError) -> bool:
    return error.repeatable or _is_refused(error) or is_unbound(error)


def _is_held_up(step: Step, error: TilewrightError) -> bool:
    """True if a request may be sent once more, as it is, after a while."""
    if not isinstance(step, Rpc) or not isinstance(error, ResourceExhaustedError) or error.retry_after is None:
        return False
    return not step.method.effect or _is_refused(error)

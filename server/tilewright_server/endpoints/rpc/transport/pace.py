"""Pace of large messages: how much of what all calls share those of one process may take while others call.

gRPC joins the parts of a request, and copies a reply, in one step under the interpreter's lock, which takes about a
millisecond for each MiB; until it is over, nobody's call gets on. That step cannot be divided, so there are only so
many of them: whoever had more than its part waits before its next large message is received or made, and whoever does
not read its replies waits for itself. Where nobody else calls, nobody waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from tilewright_server.settings.rates import Rates

__all__ = ["Pace"]

REMEMBERED_S = 60.0
"""So long after a large message of a method, its next one is taken for large."""
UNSETTLED_S = 1.0
"""Time after which a large call that was begun does not hold up the sender's others, whatever has become of it."""
SAMPLE_S = 0.1
MOST_SENDERS = 4096

# Beside the settings, which begin with ``pace_``, in seconds of the rate:
MOST_CHARGED_S = 0.5
"""For a message of less than that: there may be two in a second, however long they are."""
MOST_OWED_S = 2.0


class _Account:
    """Account of one sender. ``left``: bytes that it may have, as of ``at``."""

    __slots__ = ("_rates", "at", "busy", "busy_until", "large", "left", "replies")

    def __init__(self, rates: Rates, now: float) -> None:
        self._rates = rates
        self.left: float = rates.pace_at_once
        self.at = now
        self.large: dict[str, float] = {}
        """Methods of which a message was large, and until when the next one is taken for such."""
        self.replies: set[str] = set()
        """Those among them whose replies were."""
        self.busy, self.busy_until = "", 0.0
        """Method of a large call that is under way: its bytes are not known yet."""

    def refill(self, now: float) -> float:
        self.left = min(self._rates.pace_at_once, self.left + (now - self.at) * self._rates.pace_rate)
        self.at = now
        return self.left

    @property
    def idle(self) -> bool:
        """As good as new at ``at``."""
        return self.left >= self._rates.pace_at_once and all(until <= self.at for until in self.large.values())


class Pace:
    """Large messages of all senders. Thread-safe. Senders are named as ``Intake`` does it, by process."""

    def __init__(
        self,
        served: Callable[[], Iterable[tuple[str, int]]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        rates: Rates | None = None,
    ) -> None:
        """``served`` tells by process how much was done for it besides calls of gRPC: a number that grows."""
        self._rates = rates or Rates()
        self._large = self._rates.pace_large_bytes
        self._served = served
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: dict[str, _Account] = {}
        self._unread: dict[str, int] = {}
        self._last, self._last_at = "", 0.0
        self._before, self._before_at = "", 0.0
        """The sender of the last call, and of the last one of another sender."""
        self._sampled_at = 0.0
        self._samples: dict[str, int] = {}

    def heard(self, sender: str) -> None:
        """A call of ``sender`` came. Of gRPC's event threads, and cheap."""
        now = self._clock()
        if sender != self._last:
            self._before, self._before_at = self._last, self._last_at
            self._last = sender
        self._last_at = now

    def holds(self, sender: str, method: str) -> bool:
        """The sender's next call of ``method`` is likely to be large, and is to wait."""
        account = self._accounts.get(sender)
        if account is None or not self._rates.pace_rate:
            return False
        with self._lock:
            now = self._clock()
            if account.large.get(method, 0.0) <= now or not self._has_company(sender, now):
                return False
            if account.refill(now) <= 0 or (account.busy and now < account.busy_until):
                return True
            return method in account.replies and self._unread.get(sender, 0) >= self._rates.pace_unread_bytes

    def begin(self, sender: str, method: str) -> bool:
        """A call begins; True if it is likely to be large: then ``settle`` it at its end, too."""
        account = self._accounts.get(sender)
        if account is None:
            return False
        with self._lock:
            now = self._clock()
            if account.large.get(method, 0.0) <= now:
                return False
            account.busy, account.busy_until = method, now + UNSETTLED_S
            return True

    def received(self, sender: str, method: str, nbytes: int) -> None:
        """A request has been received."""
        if nbytes >= self._large:
            self._charge(sender, method, nbytes, reply=False)
        account = self._accounts.get(sender)
        if account is not None and method not in account.replies:
            self.settle(sender, method)

    def replied(self, sender: str, method: str, nbytes: int) -> None:
        """A reply has been made."""
        if nbytes >= self._large:
            self._charge(sender, method, nbytes, reply=True)
        self.settle(sender, method)

    def unread(self, sender: str, nbytes: int) -> None:
        """Count bytes of a reply that has not been read yet; fewer than none: that has been."""
        with self._lock:
            left = self._unread.get(sender, 0) + nbytes
            if left:
                self._unread[sender] = left
            else:
                self._unread.pop(sender, None)

    def settle(self, sender: str, method: str) -> None:
        """Nothing more is to come of a large call."""
        account = self._accounts.get(sender)
        if account is not None and account.busy == method:
            account.busy = ""

    def _charge(self, sender: str, method: str, nbytes: int, *, reply: bool) -> None:
        cost: float = nbytes
        if nbytes > self._rates.pace_long_bytes:  # it holds up others for longer than a slice
            cost *= (nbytes / self._rates.pace_long_bytes) ** 2
            cost = max(nbytes, min(cost, MOST_CHARGED_S * self._rates.pace_rate))
        with self._lock:
            now = self._clock()
            account = self._accounts.get(sender)
            if account is None:
                if len(self._accounts) >= MOST_SENDERS:
                    self._forget(now)
                account = self._accounts[sender] = _Account(self._rates, now)
            account.left = max(account.refill(now) - cost, -MOST_OWED_S * self._rates.pace_rate)
            account.large[method] = now + REMEMBERED_S
            if reply:
                account.replies.add(method)

    def _forget(self, now: float) -> None:
        """Make room: those that had nothing for long, or else all."""
        for account in self._accounts.values():
            account.refill(now)
        kept = {sender: account for sender, account in self._accounts.items() if not account.idle}
        self._accounts = kept if len(kept) < MOST_SENDERS else {}

    def _has_company(self, sender: str, now: float) -> bool:
        if now - self._sampled_at >= SAMPLE_S:
            self._sample(now)
        if self._last != sender:
            return now - self._last_at < self._rates.pace_company_s
        return bool(self._before) and now - self._before_at < self._rates.pace_company_s

    def _sample(self, now: float) -> None:
        """Notice for whom something was done over another way than gRPC."""
        self._sampled_at = now
        counts: dict[str, int] = {}
        for sender, count in self._served():
            counts[sender] = counts.get(sender, 0) + count
        for sender, count in counts.items():
            if count > self._samples.get(sender, count):
                self.heard(sender)
        self._samples = counts

"""Pace of large messages: who waits for it, for how long, and who does not."""

from __future__ import annotations

import pytest

from tilewright_server.endpoints.rpc.transport import pace as module
from tilewright_server.endpoints.rpc.transport.pace import MOST_CHARGED_S, Pace
from tilewright_server.settings.rates import Rates

DEFAULTS = Rates()
RATE, AT_ONCE = DEFAULTS.pace_rate, DEFAULTS.pace_at_once
LARGE_BYTES, LONG_BYTES = DEFAULTS.pace_large_bytes, DEFAULTS.pace_long_bytes
MOST_CHARGED = MOST_CHARGED_S * RATE
MIB = 1 << 20
RUN, READ, LAUNCH = "Run", "ReadBuffer", "Launch"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    return Pace(clock=clock)


def call(pace: Pace, sender: str, nbytes: int, method: str = RUN) -> None:
    """One call from its first byte to its last."""
    pace.heard(sender)
    pace.begin(sender, method)
    pace.received(sender, method, nbytes)
    pace.replied(sender, method, 0)


def served(pace: Pace, clock: Clock, nbytes: int, seconds: float) -> int:
    """How many large calls a flood gets through while another process calls all the time."""
    count, end = 0, clock.now + seconds
    while clock.now < end:
        pace.heard("victim")
        if pace.holds("flood", RUN):
            clock.now += 0.001
        else:
            call(pace, "flood", nbytes)
            count += 1
    return count


@pytest.mark.parametrize(("nbytes", "cost"), [(8 * MIB, 32 * MIB), (18 * MIB, MOST_CHARGED), (200 * MIB, 200 * MIB)])
def test_long_messages_are_few_in_a_second_beside_others(pace: Pace, clock: Clock, nbytes: int, cost: float) -> None:
    assert 10 * RATE / cost - 1 <= served(pace, clock, nbytes, 10.0) <= (AT_ONCE + 10 * RATE) / cost + 1


@pytest.mark.parametrize("nbytes", [LARGE_BYTES, LONG_BYTES])
def test_large_messages_keep_to_a_rate_of_bytes_beside_others(pace: Pace, clock: Clock, nbytes: int) -> None:
    count = served(pace, clock, nbytes, 2.0)
    assert 0.9 * 2 * RATE <= count * nbytes <= AT_ONCE + 2 * RATE + nbytes


def test_the_pace_is_as_the_settings_say(clock: Clock) -> None:
    rates = Rates(
        pace_rate=8 * MIB, pace_at_once=MIB, pace_large_bytes=4096, pace_long_bytes=2 * MIB, pace_company_s=1.0
    )
    assert 10 * 8 - 1 <= served(Pace(clock=clock, rates=rates), clock, MIB, 10.0) <= 10 * 8 + 2
    assert 2 * 10 - 1 <= served(Pace(clock=clock, rates=rates), clock, 4 * MIB, 10.0) <= 2 * 10 + 2
    small = Pace(clock=clock, rates=rates)
    for _ in range(300):
        call(small, "one", 4096)
    small.heard("other")
    assert small.holds("one", RUN)
    clock.now += 1.0
    assert not small.holds("one", RUN)
    free = Pace(clock=clock, rates=Rates(pace_rate=0))
    for _ in range(100):
        call(free, "one", 18 * MIB)
    free.heard("other")
    assert not free.holds("one", RUN)


def test_nobody_waits_where_nobody_else_calls(pace: Pace, clock: Clock) -> None:
    for _ in range(100):
        pace.heard("one")
        assert not pace.holds("one", RUN)
        call(pace, "one", 18 * MIB)
    pace.heard("other")
    assert pace.holds("one", RUN)
    clock.now += DEFAULTS.pace_company_s
    assert not pace.holds("one", RUN)


def test_what_was_taken_alone_is_not_paid_back_for_long(pace: Pace, clock: Clock) -> None:
    for _ in range(1000):
        call(pace, "one", 18 * MIB)
    clock.now += module.MOST_OWED_S + 0.01
    pace.heard("other")
    assert not pace.holds("one", RUN)


def test_small_calls_of_the_same_process_do_not_wait(pace: Pace) -> None:
    call(pace, "one", 18 * MIB)
    call(pace, "one", 18 * MIB)
    call(pace, "one", LARGE_BYTES - 1, LAUNCH)
    pace.heard("other")
    assert pace.holds("one", RUN)
    assert not pace.holds("one", LAUNCH)
    assert not pace.holds("other", RUN)


def test_one_large_call_is_received_at_a_time(pace: Pace, clock: Clock) -> None:
    call(pace, "one", 2 * MIB)
    pace.heard("other")
    assert not pace.holds("one", RUN)
    assert pace.begin("one", RUN)
    assert pace.holds("one", RUN)  # how large it is will be known when it has come
    pace.settle("one", RUN)
    assert not pace.holds("one", RUN)
    pace.begin("one", RUN)
    clock.now += module.UNSETTLED_S * 0.9
    pace.heard("other")
    assert pace.holds("one", RUN)
    clock.now += module.UNSETTLED_S * 0.2
    pace.heard("other")
    assert not pace.holds("one", RUN)  # one that never comes holds up nobody


def test_large_replies_count_as_large_requests_do(pace: Pace, clock: Clock) -> None:
    pace.heard("one")
    for _ in range(64):
        pace.received("one", READ, 100)
        pace.replied("one", READ, 4 * MIB)
    pace.heard("other")
    assert pace.holds("one", READ)
    clock.now += 1.0
    pace.heard("other")
    assert not pace.holds("one", READ)
    pace.begin("one", READ)
    pace.received("one", READ, 100)
    assert pace.holds("one", READ)  # the reply is still to be made
    pace.replied("one", READ, 4 * MIB)
    assert not pace.holds("one", READ)


def test_launches_that_are_no_calls_are_company_too(clock: Clock) -> None:
    counts = {"one": 5, "other": 7}
    pace = Pace(lambda: counts.items(), clock)
    for _ in range(3):
        call(pace, "one", 18 * MIB)
    assert not pace.holds("one", RUN)  # nothing has been launched since it looked first
    clock.now += 2 * module.SAMPLE_S
    counts["one"] += 1
    assert not pace.holds("one", RUN)
    clock.now += 2 * module.SAMPLE_S
    counts["other"] += 1
    assert pace.holds("one", RUN)


def test_senders_are_forgotten_where_there_are_too_many(pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SENDERS", 8)
    for number in range(100):
        call(pace, f"sender {number}", 18 * MIB)
        assert len(pace._accounts) <= 8


def test_beside_others_a_reply_is_made_when_those_before_it_are_read(pace: Pace) -> None:
    pace.replied("one", READ, 4 * MIB)
    pace.unread("one", DEFAULTS.pace_unread_bytes)
    assert not pace.holds("one", READ)  # it is alone
    pace.heard("other")
    assert pace.holds("one", READ)
    assert not pace.holds("one", RUN)
    pace.unread("one", -4 * MIB)
    assert not pace.holds("one", READ)

"""Lines of the log on refused calls: of one process only so many, and others have theirs."""

from __future__ import annotations

import logging

import pytest

from tilewright_server.clients.client import Client
from tilewright_server.endpoints.rpc.transport import traffic
from tilewright_server.endpoints.rpc.transport.traffic import LINES, LINES_PER_S, Refusal, log_refusal

FLOOD = Client("uid:1", "pid:1@1", b"")
OTHER = Client("uid:1", "pid:2@1", b"")
REFUSAL = Refusal("NOT_FOUND", "plan", "plan_id", "there is no such plan")


def test_a_process_that_is_refused_all_the_time_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(traffic.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(traffic, "_lines", traffic._Lines())
    caplog.set_level(logging.INFO, "tilewright.calls")

    def lines() -> list[logging.LogRecord]:
        found = list(caplog.records)
        caplog.clear()
        return found

    for _ in range(10 * LINES):
        log_refusal("Execute", REFUSAL, FLOOD, "id")
    assert len(lines()) == LINES
    log_refusal("Execute", REFUSAL, OTHER, "id")
    assert len(lines()) == 1
    now[0] += 2.0
    for _ in range(LINES):
        log_refusal("Execute", REFUSAL, FLOOD, "id")
    records = lines()
    assert len(records) == 2 * LINES_PER_S
    assert records[0].__dict__["fields"]["left_out"] == 9 * LINES
    assert "left_out" not in records[1].__dict__["fields"]

"""`tilewright doctor --deep` on the CPU: what it tests, what it writes, and that it can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tilewright_tools.cli.machine import self_test
from tilewright_tools.cli.machine.self_test import Outcome
from tilewright_tools.cli.problems.checks import Check


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first problem of all."""
    examples = list(self_test._examples())[:1]
    monkeypatch.setattr(self_test, "_examples", lambda: iter(examples))


@pytest.mark.usefixtures("few")
@pytest.mark.extended
def test_a_device_is_tested_and_a_report_is_written(cli: Any, target: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = cli("doctor", "--deep", "--device", "cpu:0", "--target", target, "--report", report, "--json")
    found = json.loads(report.read_text())
    assert ran.code == 0, found
    assert ran.json == found
    states = {item["topic"]: item["state"] for item in found["tests"]}
    assert states.pop("memory") == "skipped"  # a CPU has the host's
    assert {"order", "refusals", "lost client"} <= states.keys()
    assert any(topic.startswith("kernel ") for topic in states)
    assert set(states.values()) == {"ok"}
    assert found["device"] == "cpu:0"
    assert any(item["topic"] == "python" for item in found["machine"])


@pytest.mark.usefixtures("few")
def test_wrong_results_fail(cli: Any, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = Check(error=1.0, tolerance=0.0, accuracy=0.0, max_error=1.0, correct=0, total=1)
    monkeypatch.setattr("tilewright_tools.cli.problems.checks.check_outputs", lambda *_: off)
    report = tmp_path / "report.json"
    ran = cli("doctor", "--deep", "--device", "cpu:0", "--target", target, "--report", report)
    assert ran.code == 1
    states = {item["topic"]: item["state"] for item in json.loads(report.read_text())["tests"]}
    assert states["order"] == states["lost client"] == "failed"
    assert states["refusals"] == "ok"


@pytest.mark.usefixtures("few")
def test_nothing_is_begun_after_the_time(target: str) -> None:
    found = list(self_test.self_test(target, "cpu:0", -1.0))
    assert found and {item.state for item in found} == {"skipped"}
    assert all(isinstance(item, Outcome) and item.detail == "the time is up" for item in found)

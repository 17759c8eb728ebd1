"""Times that were taken while clocks were held down are thrown away, and told."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_kit.selection.strategies import Heuristic
from tilewright_tools.tuning.measure import worker as worker_module
from tilewright_tools.tuning.measure.clocks import Clocks, reasons_of
from tilewright_tools.tuning.measure.process import WorkerProcess
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.measure.timing import TimingOptions
from tilewright_tools.tuning.measure.worker import Worker
from tilewright_tools.tuning.oracle import Oracle
from tilewright_tools.tuning.sweep import SweepOptions

CASE = Case(24, 48, 40)
QUICK = TimingOptions(warmup=1, repeat=3, seconds=0.05)
NVML = r"""
#include <stdio.h>
/* Reads its answers, one reason's bits after the other, from a file; 0 when they are used up. */
static FILE *answers;
int nvmlInit_v2(void) { answers = fopen("@ANSWERS@", "r"); return answers ? 0 : 9; }
int nvmlShutdown(void) { fclose(answers); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = answers; return bus[0] != '0'; }
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *bits)
{ if (fscanf((FILE *) device, "%llx", bits) != 1) *bits = 0; return 0; }
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) { (void) device; *mhz = 1980 + kind - 1; return 0; }
"""


@pytest.fixture
def nvml(tmp_path: Path) -> Callable[[str], Clocks]:
    """A library that answers the given words."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc)")

    def make(answers: str) -> Clocks:
        (tmp_path / "answers").write_text(answers)
        source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
        source.write_text(NVML.replace("@ANSWERS@", str(tmp_path / "answers")))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        return Clocks("cuda", "0000:01:00.0", str(library))

    return make


def test_heat_and_hardware_hold_clocks_down_and_the_power_cap_is_usual() -> None:
    assert reasons_of(0x01 | 0x04) == ""
    assert reasons_of(0x40 | 0x04) == "hardware thermal slowdown"
    assert reasons_of(0x28) == "hardware slowdown, software thermal slowdown"


def test_nothing_is_known_without_the_library_or_of_other_devices(nvml: Callable[[str], Clocks]) -> None:
    for clocks in (Clocks("cuda", "0000:01:00.0", "libno-such-library.so"), Clocks("cpu", ""), Clocks("hip", "0000")):
        assert (clocks.known, clocks.throttled(), clocks.mhz()) == (False, "", 0)
    clocks = nvml("8")
    assert (clocks.known, clocks.throttled(), clocks.mhz()) == (True, "hardware slowdown", 1980)
    clocks.close()
    clocks.close()
    assert clocks.throttled() == ""


def measured(setup: Setup, clocks: Clocks) -> Mapping[str, Any]:
    worker = Worker()
    assert worker.answer({"do": "open", "setup": setup.to_dict(), "device": "cpu:0"})["ok"]
    worker._clocks = clocks
    case = {"do": "case", "family": "gemm", "case": CASE.to_dict(), "options": QUICK.to_dict(), "seed": 1}
    assert worker.answer({**case, "check": True})["ok"]
    engine = worker._require()[0]
    operation = engine.operations["gemm"]
    problem = operation.parse(CASE.request())
    config = operation.candidates(problem, engine.devices.info("cpu:0"))[0]
    plan = operation.plan(problem, config, engine.devices.info("cpu:0"))
    from tilewright_server.engine.call import Call

    for unit in (operation.generate(item, engine.devices.info("cpu:0").arch) for item in plan.kernels):
        engine.pool.submit(unit, engine.devices.info("cpu:0").arch).wait(Call())
    reply = worker.answer(
        {"do": "measure", "operation": "gemm", "config": config.to_dict(), "check": True, "samples": 3}
    )
    worker.close()
    return reply


def test_a_time_under_held_down_clocks_is_taken_again(
    plain: Setup, nvml: Callable[[str], Clocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_PAUSES_S", (0.01, 0.01))
    reply = measured(plain, nvml("40 8 4"))
    assert (reply["throttled"], reply["clock_mhz"]) == ("", 1980)
    assert reply["timing"]["median_ns"] > 0
    assert reply["error_norm"] is not None  # checked in the first run


def test_clocks_that_stay_down_leave_no_time(
    plain: Setup, nvml: Callable[[str], Clocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_PAUSES_S", (0.01, 0.01))
    reply = measured(plain, nvml("40 40 20"))
    assert (reply["throttled"], reply["timing"]) == ("software thermal slowdown", None)


class Slowed(WorkerProcess):
    """Its clock goes at a hundredth of the pace for some measurements."""

    def __init__(self, setup: Setup, slow: range) -> None:
        super().__init__({"do": "open", "setup": setup.to_dict(), "device": "cpu:0"})
        self.slow, self.measured = slow, 0

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        reply = super().ask(request, timeout_s)
        if request["do"] == "measure" and not request["check"] and reply["timing"]:
            self.measured += 1
            if self.measured in self.slow:
                reply["timing"]["median_ns"] *= 100.0
        return reply


@pytest.mark.parametrize("slow", [range(1, 4), range(9, 12)], ids=["the first round", "a later round"])
def test_rounds_of_an_oracle_under_held_down_clocks_do_not_count(plain: Setup, slow: range) -> None:
    options = SweepOptions("cpu:0", limit=2, configs="candidates", timing=QUICK, cut_off=0.0)
    engine = plain.engine()
    oracle = Oracle(engine, plain, options, (Heuristic(),), Slowed(plain, slow), draws=3, drift=30.0)
    found = {item.kernel: item for item in oracle.run([CASE])}
    oracle.close()
    engine.close()
    rounds = [json.loads(item.draws) for item in found.values()]
    assert [len(item) for item in rounds] == [3] * len(found)
    assert all(max(item) < 30 * min(item) for item in rounds)


def test_a_sweep_skips_a_kernel_whose_clocks_stay_down_and_says_so(plain: Setup, make_sweep: Any) -> None:
    class Hot(WorkerProcess):
        def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
            reply = super().ask(request, timeout_s)
            return {**reply, "timing": None, "throttled": "hardware slowdown"} if request["do"] == "measure" else reply

    sweep = make_sweep(plain, limit=1)
    sweep._worker = Hot({"do": "open", "setup": plain.to_dict(), "device": "cpu:0"})
    (found,) = sweep.run([CASE])
    assert (found.status, found.median_ns) == ("skipped", 0.0)
    assert "held down: hardware slowdown" in found.reason


def test_a_sweep_whose_time_is_over_begins_no_other_problem(plain: Setup, make_sweep: Any) -> None:
    sweep = make_sweep(plain, limit=1, budget=1e-6)
    assert list(sweep.run([CASE, Case(8, 16, 24)])) == []
    sweep = make_sweep(plain, limit=1, budget=600.0)
    assert {item.case for item in sweep.run([CASE, Case(8, 16, 24)])} == {CASE, Case(8, 16, 24)}

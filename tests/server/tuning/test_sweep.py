"""A sweep survives whatever a kernel does, says what happened, and keeps the right ones' times."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted_gemm
import pytest

from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_kit.types.errors import DeviceError, NotFoundError
from tilewright_tools.tuning.measure.process import WorkerEndedError, WorkerProcess
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.measure.timing import TimingOptions
from tilewright_tools.tuning.problems.prepared import prepared_request
from tilewright_tools.tuning.results import Output, Result
from tilewright_tools.tuning.sweep import Event, Sweep

pytestmark = pytest.mark.slow

CASE = Case(64, 48, 1100)


def last(results: list[Result]) -> dict[str, Result]:
    return {item.kernel: item for item in results}


def fault(result: Result) -> str:
    return planted_gemm.FAULTS[result.config["tile"][2]]


@pytest.mark.extended
def test_a_kernel_that_crashes_hangs_or_is_wrong_costs_only_itself(make_sweep: Any, planted: Setup) -> None:
    sweep: Sweep = make_sweep(planted, timeout_s=1.0, seed=3)
    results = list(sweep.run([CASE]))
    by_fault = {fault(item): item for item in last(results).values()}
    assert {name: item.status for name, item in by_fault.items()} == {
        "": "ok", "crash": "crashed", "hang": "hung", "empty": "wrong", "off": "wrong", "broken": "build_failed",
    }  # fmt: skip
    assert "SIGSEGV" in by_fault["crash"].reason
    assert "no answer within" in by_fault["hang"].reason
    assert f"{64 * 48} unwritten" in by_fault["empty"].reason
    assert "relative error 0.01" in by_fault["off"].reason
    assert "seed 3" in by_fault["off"].reason
    assert "planted by the test" in by_fault["broken"].reason
    assert by_fault[""].median_ns > 0
    assert [item.measurement() is not None for item in by_fault.values()] == [name == "" for name in by_fault]


@pytest.mark.extended
def test_a_device_in_a_process_of_its_own_may_be_lost_and_is_opened_again(make_sweep: Any, planted: Setup) -> None:
    timing = TimingOptions(warmup=1, repeat=4, rotating=3, seconds=0.05)
    sweep: Sweep = make_sweep(replace(planted, cpu_isolated=True), timeout_s=1.0, timing=timing, finalists=0)
    by_fault = {fault(item): item for item in sweep.run([CASE])}
    assert {name: item.status for name, item in by_fault.items()} == {
        "": "ok", "crash": "crashed", "hang": "hung", "empty": "wrong", "off": "wrong", "broken": "build_failed",
    }  # fmt: skip
    assert by_fault[""].stamp.conditions["rotating"] == 3
    assert sweep._worker.starts == 3


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.extended
def test_what_hung_is_gone_with_everything_that_it_started(
    make_sweep: Any, planted: Setup, monkeypatch: pytest.MonkeyPatch, isolated: bool
) -> None:
    mark = f"TILEWRIGHT_TEST_MARK={os.getpid()}-{isolated}".encode()
    monkeypatch.setenv(*mark.decode().split("="))
    setup = replace(planted, cpu_isolated=isolated)
    sweep: Sweep = make_sweep(setup, timeout_s=0.5, pattern="*x384_*", finalists=0)
    assert [item.status for item in sweep.run([CASE])] == ["hung"]
    assert not sweep._worker.running
    deadline = time.monotonic() + 5
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


def marked(mark: bytes) -> list[str]:
    """Processes, other than this one, that were started with a mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
    return found


@pytest.mark.extended
def test_every_result_is_stamped_with_what_it_means_nothing_without(make_sweep: Any, plain: Setup) -> None:
    sweep: Sweep = make_sweep(plain, limit=2, seed=1)
    result = list(sweep.run([CASE]))[-1]
    row = result.measurement()
    assert row is not None
    assert (row.operation, row.arch, row.device) == ("gemm", sweep.device.arch.id, sweep.device.name)
    assert row.key == str(sweep._engine.operations["gemm"].config_type.from_dict(row.config).key(row.arch))
    assert dict(row.sizes)["k"] == 1100
    assert row.flops == CASE.flops
    assert 0 <= row.error < 1e-6
    assert row.toolchain
    assert row.date.endswith("Z")
    assert row.conditions == {"init": "normal", "rotating": 1, "flush": False, "timer": "device", "warmup": 1}


KINDS = (
    Case(40, 24, 33, "bf16", "rrr", bias="yes", activation="Gelu"),
    Case(9, 30, 64, "int8", "ccr"),
    Case(17, 16, 70, "fp8", "crr", out_dtype="bf16"),
    Case(20, 20, 20, "mixed", batch=3),
    Case(24, 40, 16, "fp32", d=2, scale_a="row", scale_b="column"),
    Case(600, 700, 801, "fp16", "rrr"),
    Case(300, 200, 2500, "int8", batch=2),
    Case(640, 520, 900, "fp32", activation="Relu", bias="fp32", d=1),
)


@pytest.mark.extended
def test_products_of_every_kind_are_built_checked_and_timed(make_sweep: Any, plain: Setup) -> None:
    results = list(make_sweep(plain, limit=1, finalists=0).run(KINDS))
    assert [(item.case, item.status, item.reason) for item in results] == [(case, "ok", "") for case in KINDS]
    for item in results:
        assert item.median_ns > 0
        assert item.flops == item.case.flops


@pytest.mark.extended
def test_wrong_rows_of_a_large_product_are_found(make_sweep: Any, planted: Setup) -> None:
    sweep: Sweep = make_sweep(planted, timeout_s=20.0, pattern="*x256_*", finalists=0)
    (result,) = list(sweep.run([Case(700, 600, 700)]))
    assert result.status == "wrong"
    assert "some rows and columns" in result.reason


@pytest.mark.extended
def test_operands_rotate_caches_are_flushed_and_the_host_may_hold_the_watch(make_sweep: Any, plain: Setup) -> None:
    timing = TimingOptions(warmup=1, repeat=3, rotating=3, timer="host", init="trunc-int", seconds=0.05)
    (rotated,) = list(make_sweep(plain, limit=1, finalists=0, timing=timing).run([CASE]))
    assert rotated.status == "ok"
    assert rotated.error == 0.0  # small whole numbers have exact sums
    assert rotated.stamp.conditions["rotating"] == 3
    timing = TimingOptions(warmup=1, repeat=3, flush=True, init="uniform", seconds=0.05)
    (flushed,) = list(make_sweep(plain, limit=1, finalists=0, timing=timing).run([CASE]))
    assert flushed.status == "ok"
    assert flushed.stamp.conditions["flush"] is True


def test_a_problem_whose_time_is_over_skips_the_rest_of_its_kernels(make_sweep: Any, plain: Setup) -> None:
    sweep: Sweep = make_sweep(plain, limit=3, seconds=1e-6, finalists=0)
    other = Case(16, 16, 16)
    results = list(sweep.run([CASE, other]))
    assert [(item.case, item.status) for item in results if item.status != "ok"] == [
        (case, "skipped") for case in (CASE, other) for _ in range(3)
    ]  # fmt: skip
    assert "were over" in results[0].reason


def test_the_fastest_of_the_heat_are_timed_again_and_events_count(make_sweep: Any, plain: Setup) -> None:
    events: list[Event] = []
    sweep: Sweep = make_sweep(plain, limit=4, finalists=2, cut_off=0.0, timing=TimingOptions(repeat=12, seconds=0.2))
    results = list(sweep.run([CASE], listen=events.append))
    assert len(results) == 6
    heat = sorted(results[:4], key=lambda item: item.median_ns)
    assert {item.kernel for item in results[4:]} == {item.kernel for item in heat[:2]}
    assert all(item.samples <= 3 for item in results[:4])
    assert max(item.samples for item in results[4:]) > 3
    assert all(item.error is not None for item in results)
    kinds = [event.kind for event in events]
    assert kinds == ["case", *["result"] * 4, *["final"] * 2, "peer"]
    assert [event.done for event in events if event.kind == "result"] == [1, 2, 3, 4]
    assert events[-1].cases_done == events[-1].cases_total == 1


@pytest.mark.extended
def test_what_is_known_is_not_measured_again(make_sweep: Any, plain: Setup, tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    sweep: Sweep = make_sweep(plain, limit=2, finalists=0)
    with Output(path) as output:
        for result in sweep.run([CASE]):
            output.add(result)
    with Output(path, resume=True) as output:
        known = output.results
        assert len(known) == 2
        assert list(sweep.run([CASE], {CASE: known})) == []
        wider: Sweep = make_sweep(plain, limit=3, finalists=0)
        (new,) = list(wider.run([CASE], {CASE: known}))
        assert new.kernel not in {item.kernel for item in known}


@pytest.mark.extended
def test_a_kernel_set_and_a_file_of_configurations_take_the_problems_signature(
    make_sweep: Any, plain: Setup, tmp_path: Path
) -> None:
    case = Case(32, 32, 32, "bf16", "rrr", bias="fp32")
    sweep: Sweep = make_sweep(plain, configs="default", limit=2, finalists=0)
    results = list(sweep.run([case]))
    assert [item.status for item in results] == ["ok", "ok"]
    assert all(item.config["bias"] == "fp32" and item.config["layout"] == "rrr" for item in results)
    file = tmp_path / "configs.jsonl"
    # Of this machine: other levels of the CPU have other tiles.
    rows, columns, _ = sweep.device.arch.warp_tiles["fp32_fp32_fp32"][0]
    wanted = {"tile": [rows, 2 * columns, 256], "wave": [1, 1, 1], "warp_tile": [rows, columns, 1]}
    file.write_text(json.dumps({"dtype_a": "fp32", "pipeline": "compv3", "epilogue": "default", **wanted}) + "\n")
    (found,) = list(make_sweep(plain, configs=str(file)).run([Case(32, 32, 32)]))
    assert found.config["tile"] == wanted["tile"]
    assert found.status == "ok"
    with pytest.raises(NotFoundError, match="no kernel set"):
        list(make_sweep(plain, configs="no such set").run([case]))


@pytest.mark.extended
def test_the_fastest_are_crossed_into_kernels_that_nobody_proposed(make_sweep: Any, plain: Setup) -> None:
    sweep: Sweep = make_sweep(plain, limit=3, explore=1, finalists=2)
    case = Case(48, 64, 80)
    results = list(sweep.run([case]))
    bred = [item for item in results if item.place == 0]
    assert len(bred) >= 16
    assert {item.status for item in bred} == {"ok"}
    assert not {item.kernel for item in bred} & {item.kernel for item in results[:3]}
    engine = sweep._engine
    operation = engine.operations["gemm"]
    proposed = operation.candidates(operation.parse(case.request()), sweep.device)
    assert {item.kernel for item in bred} - {config.name for config in proposed}


def test_a_worker_that_does_not_start_is_told_with_its_last_words() -> None:
    worker = WorkerProcess({"do": "open"}, command=("/bin/sh", "-c", "echo no such luck >&2; exit 3"))
    with pytest.raises(DeviceError) as caught:
        worker.ask({}, 1.0)
    assert "exit code 3" in caught.value.reason
    assert "no such luck" in caught.value.log_tail
    worker.close()


def test_a_worker_that_does_not_answer_is_ended_in_time() -> None:
    script = "read line; echo '{\"ok\": true}'; read line; sleep 60"
    worker = WorkerProcess({"do": "open"}, command=("/bin/sh", "-c", script))
    begun = time.monotonic()
    with pytest.raises(WorkerEndedError) as caught:
        worker.ask({"do": "measure"}, 0.2)
    assert caught.value.how == "hung"
    assert time.monotonic() - begun < 10
    assert not worker.running
    worker.close()


@pytest.mark.extended
def test_packed_weights_are_packed_once_and_checked(make_sweep: Any, plain: Setup) -> None:
    case = Case(40, 70, 33, layout="rrr", packed="yes")
    results = list(make_sweep(plain, limit=1, finalists=0).run([case, Case(24, 16, 300, "mixed", packed="yes")]))
    assert [item.status for item in results] == ["ok"] * 2, [item.reason for item in results]
    assert all("preshuffle" in item.kernel for item in results)
    assert all(item.error is not None and item.error < 1e-3 for item in results)


def test_operands_are_prepared_by_the_favourite_of_the_model(plain: Setup) -> None:
    engine = plain.engine()
    try:
        device = engine.devices.info("cpu:0")
        request, (prepared,) = prepared_request(engine, device, Case(40, 70, 33, layout="rrr", packed="yes"))
        assert prepared.name == "b"
        assert [config.operation for config in prepared.plan.kernels] == ["gemm_pack_b"]
        assert request.inputs["b"].packing.startswith("bpanel-fp32-")
        assert prepared_request(engine, device, CASE) == (CASE.request(), [])
    finally:
        engine.close()

"""What every command of `tilewright run` does: run once, prepare a plan, time it, and look at what it wrote."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from tilewright_server.cli import cases
from tilewright_server.cli.exits import Exit, exit_for
from tilewright_server.cli.output import note, print_error, print_json, table

if TYPE_CHECKING:
    import numpy.typing as npt

    import tilewright

    Array = npt.NDArray[Any]

__all__ = ["execute", "execute_all", "note_check", "poison", "report", "show", "validate"]


def execute(
    client: tilewright.Client,
    operation: str,
    inputs: Mapping[str, Any],
    attributes: Mapping[str, Any],
    chosen: Mapping[str, Any],
    flops: int,
    repeat: int,
) -> tuple[dict[str, Any], Array]:
    """Run and time an operation with one output: the record in the seeds' words, and what the plan wrote."""
    record, outputs = execute_all(client, operation, inputs, attributes, chosen, flops, repeat)
    (out,) = outputs.values()
    return record, out


def execute_all(
    client: tilewright.Client,
    operation: str,
    inputs: Mapping[str, Any],
    attributes: Mapping[str, Any],
    chosen: Mapping[str, Any],
    flops: int,
    repeat: int,
) -> tuple[dict[str, Any], dict[str, Array]]:
    """``execute``, of an operation with any number of outputs."""
    outputs = client.run(operation, inputs, attributes=attributes, **chosen)
    first = client.report
    assert first is not None, "a call that returned has a report"
    plan = client.plan(operation, inputs, outputs, attributes, **chosen)
    for out in outputs.values():
        poison(out)  # what is checked is what the plan writes
    samples = []
    for _ in range(repeat):
        plan(**inputs, out=outputs)
        report = client.report
        assert report is not None
        samples.append(report.timing.device_ns)
    device_ns = max(statistics.median(samples), 1)
    record: dict[str, Any] = {
        "kernel": first.kernels[0] if first.kernels else "",
        "kernels": list(first.kernels),
        "device": first.device,
        "execution": {
            "time_ms": device_ns / 1e6,
            "tflops": flops / device_ns / 1e3,
            "flops": flops,
            "repeat": repeat,
            "build_ms": first.timing.build_ns / 1e6,
            "bytes_copied": first.bytes_copied,
        },
        "validation": None,
        "status": "success",
    }
    if first.notes:
        record["notes"] = list(first.notes)
    return record, outputs


def poison(out: Array) -> None:
    """Fill an array, however it lies, with bytes that no result has."""
    import numpy as np

    out[...] = np.full(out.dtype.itemsize, 0xFF, np.uint8).view(out.dtype)[0]


def validate(record: dict[str, Any], out: Array, truth: Array, depth: int) -> None:
    """Compare what was written with the truth, and note it in the record."""
    note_check(record, cases.check(out, truth, depth))


def note_check(record: dict[str, Any], found: cases.Check) -> None:
    record["validation"] = {
        "accuracy": found.accuracy,
        "max_error": found.max_error,
        "relative_error": found.error,
        "tolerance": found.tolerance,
        "correct_elements": found.correct,
        "total_elements": found.total,
    }
    record["status"] = "success" if found.ok else "failed"


def report(record: dict[str, Any], run: Callable[[], dict[str, Any]], as_json: bool, what: str, problem: str) -> None:
    """Run, and print the record with what ``run`` adds, or the error. Exits with 1 if a result is off."""
    try:
        record |= run()
    except Exception as error:
        code = getattr(error, "code", "")
        if not as_json or not isinstance(code, str) or not code:
            raise
        print_error(error)
        record |= {"status": "error", "error": {"code": code, "message": str(error)}}
        print_json(record)
        raise typer.Exit(exit_for(code)) from None
    if as_json:
        print_json(record)
    else:
        show(record, what, problem)
    if record["status"] != "success":
        raise typer.Exit(Exit.FAILED)


def show(record: Mapping[str, Any], what: str, problem: str) -> None:
    """The record as a table for people."""
    execution, validation = record["execution"], record["validation"]
    rows = [
        ("problem", problem),
        ("kernel", "\n".join(record["kernels"]) or "none: nothing to compute"),
        ("device", record["device"]),
        ("time", f"{execution['time_ms']:.4f} ms, the median of {execution['repeat']}"),
        ("speed", f"{execution['tflops'] * 1e3:.1f} GFLOP/s"),
        ("build", f"{execution['build_ms']:.0f} ms" if execution["build_ms"] else "was built already"),
        *(("note", text) for text in record.get("notes", ())),
    ]
    if validation:
        error = f"relative error {validation['relative_error']:.1e} (allowed {validation['tolerance']:.1e})"
        rows.append(("check", f"{record['status']}: {error}, {validation['accuracy']:.2f} % of elements within 2 %"))
    table("", ("", what), rows)
    if record["status"] != "success":
        note("the result is off")

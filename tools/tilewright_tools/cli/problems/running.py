"""`tilewright run OPERATION`: one problem on random data, timed, and checked if asked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright_kit.commands.problem_command import ProblemCommand
from tilewright_tools.cli.console.exits import Exit, exit_for
from tilewright_tools.cli.console.options import AsJson, Device, Target, command_of, parameters_of, taken
from tilewright_tools.cli.console.output import kernel_text, note, print_error, print_json, table, working
from tilewright_tools.cli.problems.parameters import check_words, signature_of

if TYPE_CHECKING:
    import numpy.typing as npt

    import tilewright
    from tilewright_tools.cli.problems.checks import Check
    from tilewright_tools.cli.problems.loading import Loaded

    Array = npt.NDArray[Any]

__all__ = ["poison", "run_command"]

Kernel = Annotated[str, typer.Option(help="Run this kernel, by name.")]
Config = Annotated[
    str,
    typer.Option(help="Run this configuration: a file, JSON text, or -. It may leave the signature out."),
]
Strategy = Annotated[str, typer.Option(help="Way to choose a kernel: auto, measured, heuristic, first_fit.")]
Validate = Annotated[bool, typer.Option("--validate", help="Compare with float64 NumPy; exit code 1 if it is off.")]
Repeat = Annotated[int, typer.Option(min=1, help="Timed executions.")]
Seed = Annotated[int, typer.Option(help="Seed of the data.")]


def _options(
    kernel: Kernel = "",
    config: Config = "",
    strategy: Strategy = "",
    validate: Validate = False,
    repeat: Repeat = 20,
    device: Device = "",
    seed: Seed = 0,
    target: Target = "",
    as_json: AsJson = False,
) -> None:
    """The options of every command."""


def run_command(command: ProblemCommand) -> Callable[..., None]:
    """The command that runs problems of one declaration. It exits with 1 if a result is off."""
    declared = (*command.problem, *command.steps)
    own, shared = signature_of(declared), parameters_of(_options)

    def run(given: dict[str, Any]) -> None:
        from tilewright_tools.cli.problems.loading import case_of, load

        check_words(declared, given)
        problem = taken(given, own)
        loaded = load(command, case_of(command, problem))
        _run(loaded, **taken(given, shared))

    return command_of(
        run, command.name, f"Run {command.noun} on random data: timed, and checked if asked.", own, shared
    )


def _run(
    loaded: Loaded,
    kernel: str,
    config: str,
    strategy: str,
    validate: bool,
    repeat: int,
    device: str,
    seed: int,
    target: str,
    as_json: bool,
) -> None:
    from tilewright_tools.cli.private_server import connected
    from tilewright_tools.cli.problems.checks import check_outputs
    from tilewright_tools.cli.problems.config_file import fields_of
    from tilewright_tools.cli.problems.loading import operands, prepared

    chosen: dict[str, Any] = {"kernel": kernel or None, "strategy": strategy or None, "device": device or None}
    if config:
        chosen["config"] = fields_of(config, loaded)

    def recorded() -> dict[str, Any]:
        with connected(target) as client, working(f"running {loaded.case.label}"):
            inputs = operands(client, loaded, seed)
            given = prepared(client, loaded, inputs, device or None)
            record, outputs = _execute(client, loaded, given, chosen, repeat)
            if validate:
                _note_check(record, check_outputs(loaded, inputs, outputs))
            return record

    _report({"problem": dict(loaded.command.describe(loaded.case))}, recorded, as_json, loaded)


def _execute(
    client: tilewright.Client, loaded: Loaded, inputs: Mapping[str, Any], chosen: Mapping[str, Any], repeat: int
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Run and time an operation: the record, and the outputs that the plan wrote."""
    operation, attributes, flops = loaded.operation.name, loaded.request.attributes, loaded.case.flops
    outputs = client.run(operation, inputs, attributes=attributes, **chosen)
    first = client.report
    assert first is not None, "a call that returned has a report"
    plan = client.plan(operation, inputs, outputs, attributes, **chosen)
    for out in outputs.values():
        poison(out)  # only what the plan writes can pass the check
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


def _note_check(record: dict[str, Any], found: Check) -> None:
    record["validation"] = {
        "accuracy": found.accuracy,
        "max_error": found.max_error,
        "relative_error": found.error,
        "tolerance": found.tolerance,
        "correct_elements": found.correct,
        "total_elements": found.total,
    }
    record["status"] = "success" if found.ok else "failed"


def _report(record: dict[str, Any], run: Callable[[], dict[str, Any]], as_json: bool, loaded: Loaded) -> None:
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
        raise typer.Exit(exit_for(code, str(getattr(error, "rule", "")))) from None
    if as_json:
        print_json(record)
    else:
        _show(record, loaded)
    if record["status"] != "success":
        raise typer.Exit(Exit.FAILED)


def _show(record: Mapping[str, Any], loaded: Loaded) -> None:
    """The record as a table for people."""
    execution, validation = record["execution"], record["validation"]
    rows = [
        ("problem", loaded.case.label),
        ("kernel", "\n".join(map(kernel_text, record["kernels"])) or "none: nothing to compute"),
        ("device", record["device"]),
        ("time", f"{execution['time_ms']:.4f} ms, the median of {execution['repeat']}"),
        ("speed", f"{execution['tflops'] * 1e3:.1f} GFLOP/s"),
        ("build", f"{execution['build_ms']:.0f} ms" if execution["build_ms"] else "was built already"),
        *(("note", text) for text in record.get("notes", ())),
    ]
    if validation:
        error = f"relative error {validation['relative_error']:.1e} (allowed {validation['tolerance']:.1e})"
        rows.append(("check", f"{record['status']}: {error}, {validation['accuracy']:.2f} % of elements within 2 %"))
    table("", ("", loaded.operation.name), rows)
    if record["status"] != "success":
        note("the result is off")

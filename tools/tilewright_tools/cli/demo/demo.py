"""`tilewright demo`: a server, a client in another process, every installed operation, checked and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.options import FullNames
from tilewright_tools.cli.console.output import examples, note, out, print_json, progress, table
from tilewright_tools.cli.problems.checks import Check, check_outputs

if TYPE_CHECKING:
    import numpy.typing as npt

    import tilewright
    from tilewright_kit.commands.problem_command import Example, ProblemCommand

    Array = npt.NDArray[Any]

__all__ = ["EPILOG", "Row", "best_of", "demo"]

TURNS, TURN_S, SETTLE_S = 4, 0.02, 0.01
EPILOG = examples(
    "tilewright demo",
    "tilewright demo --size 512 --dtype fp32 --dtype bf16",
    "tilewright demo --target unix:/tmp/tw.sock --json",
)


@dataclass(frozen=True)
class Row:
    """One line of the table. Times are seconds of one call, through the service and back."""

    what: str
    kernel: str
    seconds: float
    numpy_seconds: float
    """Seconds of the same in NumPy; 0 where NumPy has nothing alike."""
    flops: int
    check: Check

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9

    @property
    def ratio(self) -> float:
        return self.numpy_seconds / self.seconds


def demo(
    size: int = typer.Option(1024, min=16, max=8192, help="Sizes of square problems."),
    dtype: list[str] = typer.Option([], help="Only square problems of these element types. Repeatable."),
    device: str = typer.Option("", help="Device: cpu:0, cuda:0, hip:0, ... Default: the server's."),
    target: str = typer.Option("", help="Use this server and start none."),
    full_names: FullNames = False,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show it all in a minute: a server, and every installed operation in all of its types and layouts from another
    process, checked and timed.

    Operands and results lie in shared memory; each result is compared with float64 NumPy, each time with NumPy's own
    float32 products. Exit code 1 if a result is off.
    """
    from tilewright_tools.cli.machine.settings import rerun_with_numpy_at_its_best
    from tilewright_tools.cli.private_server import PrivateServer, connected

    again = ["demo", "--size", str(size), *(part for name in dtype for part in ("--dtype", name))]
    again += [*(["--device", device] if device else []), *(["--target", target] if target else [])]
    again += ["--full-names"] if full_names else []
    code = rerun_with_numpy_at_its_best([*again, "--json"] if as_json else again)
    if code is not None:
        raise typer.Exit(code)
    begun = time.perf_counter()
    if target:
        with connected(target) as client:
            rows = _tour(client, size, dtype, device or None)
    else:
        server = PrivateServer()
        with server as private, connected(private) as client:
            note(f"server: process {server.pid}, ready after {server.start_seconds:.2f} s")
            note("client: another process; operands and results lie in shared memory")
            rows = _tour(client, size, dtype, device or None)
    seconds = time.perf_counter() - begun
    wrong = [row for row in rows if not row.check.ok]
    if as_json:
        print_json({"rows": [_record(row) for row in rows], "seconds": seconds, "ok": not wrong})
    else:
        _show(rows, size, full_names)
        verdict = f"{len(rows) - len(wrong)} of {len(rows)} results agree with float64 NumPy, in {seconds:.0f} s"
        style = "bold red" if wrong else "bold green"
        out().print(f"[{style}]{'FAILED' if wrong else 'OK'}[/]: {verdict}")
    if wrong:
        raise typer.Exit(Exit.FAILED)


def _tour(client: tilewright.Client, size: int, dtypes: Sequence[str], device: str | None) -> list[Row]:
    from tilewright_kit.commands.cases import DTYPES
    from tilewright_kit.commands.discovery import installed_commands

    todo = [(command, item) for command in installed_commands().values() for item in command.demonstrated(size)]
    if dtypes:
        known = {item.title.split()[0] for _, item in todo}
        if unknown := [name for name in dtypes if name not in known]:
            words = ", ".join(sorted(known & set(DTYPES)))
            raise typer.BadParameter(f"{unknown[0]} has no square problems; use {words}", param_hint="--dtype")
        todo = [(command, item) for command, item in todo if item.title.split()[0] in dtypes]
    rows = []
    with progress() as bar:
        task = bar.add_task("building and running", total=len(todo))
        for command, item in todo:
            bar.update(task, description=item.title)
            rows.append(_row(client, command, item, device))
            bar.advance(task)
    return rows


def _row(client: tilewright.Client, command: ProblemCommand, item: Example, device: str | None) -> Row:
    """Run a problem through the service, check what its plan wrote, and time it beside NumPy."""
    from tilewright_tools.cli.problems.loading import load, operands, prepared
    from tilewright_tools.cli.problems.running import poison

    loaded = load(command, item.case)
    inputs = operands(client, loaded)
    given = prepared(client, loaded, inputs, device, required=False)
    operation, attributes = loaded.operation.name, loaded.request.attributes
    outputs = client.run(operation, given, attributes=attributes, device=device)
    report = client.report
    assert report is not None, "a call that returned has a report"
    plan = client.plan(operation, given, outputs, attributes, device=device)
    for output in outputs.values():
        poison(output)  # only what the plan writes can pass the check
    plan(**given, out=outputs)
    found = check_outputs(loaded, inputs, outputs)
    seconds, numpy_seconds = best_of(plan.bind(**given, out=outputs), command.numpy_call(item.case, inputs))
    return Row(item.title, command.shown_kernel(report.kernels), seconds, numpy_seconds, item.case.flops, found)


def best_of(ours: Callable[[], object], numpys: Callable[[], object] | None) -> tuple[float, float]:
    """Seconds of the fastest of several calls of each; 0 for none. They take turns, so that both meet the same load."""
    calls = [ours, *([numpys] if numpys else [])]
    best = [float("inf")] * len(calls)
    for _ in range(TURNS):
        for index, call in enumerate(calls):
            time.sleep(SETTLE_S)  # threads of the one before, which spin for a while, go to sleep
            end = time.perf_counter() + TURN_S
            begun = 0.0
            while begun < end:
                begun = time.perf_counter()
                call()
                best[index] = min(best[index], time.perf_counter() - begun)
    return best[0], best[1] if numpys else 0.0


def _record(row: Row) -> dict[str, Any]:
    record = asdict(row) | {"gflops": row.gflops, "ratio_to_numpy": row.ratio}
    record["check"]["ok"] = row.check.ok
    return record


def _show(rows: Sequence[Row], size: int, full_names: bool) -> None:
    from rich.text import Text

    lines = []
    for row in rows:
        error = Text(f"{row.check.error:.0e}" if row.check.error else "exact", "" if row.check.ok else "bold red")
        ratio = f"{row.ratio:.2f}" if row.numpy_seconds else "-"
        lines.append((row.what, row.kernel, f"{row.seconds * 1e3:.3g}", f"{row.gflops:.0f}", ratio, error))
    numbers = ("ms", "GFLOP/s", "x NumPy", "error")
    title = f"every installed operation; square problems of {size}"
    table(title, ("problem", "kernel", *numbers), lines, right=numbers, full_names=full_names)

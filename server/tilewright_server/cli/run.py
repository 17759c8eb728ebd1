"""`tilewright run`: one operation on random data, timed, and checked if asked."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import typer

from tilewright_server.cli import cases
from tilewright_server.cli.exits import Exit
from tilewright_server.cli.output import examples, note, print_error, print_json, table

if TYPE_CHECKING:
    import tilewright

__all__ = ["app"]

app = typer.Typer(
    help="Run one operation on random data.",
    no_args_is_help=True,
    epilog=examples("tilewright run gemm 512 512 512 --validate"),
)


@app.callback()
def root() -> None:
    """Run one operation on random data."""


@app.command(
    "gemm",
    epilog=examples(
        "tilewright run gemm 512 512 512",
        "tilewright run gemm 128 4096 4096 --dtype bf16 --layout rcr --validate",
        "tilewright run gemm 64 64 64 --batch 16 --activation Gelu --repeat 100 --json",
        "tilewright run gemm 256 256 256 --kernel NAME    (names: tilewright kernels list)",
        "tilewright run gemm 4096 4096 4096 --dtype bf16 --device cuda:0",
        "tilewright run gemm 512 512 512 --target unix:/tmp/tw.sock",
    ),
)
def gemm(
    m: int = typer.Argument(help="Rows of A and C."),
    n: int = typer.Argument(help="Columns of B and C."),
    k: int = typer.Argument(help="Columns of A, rows of B."),
    dtype: str = typer.Option("fp32", help=f"Element type: {', '.join(cases.DTYPES)} (mixed: A fp8, B bf8)."),
    layout: str = typer.Option("rcr", help="Layouts of A, B, C: r row-major, c column-major; C is r."),
    out_dtype: str = typer.Option("", "--out-dtype", help="Element type of C. Default: what the operation says."),
    activation: str = typer.Option("", help=f"One of {', '.join(cases.ACTIVATIONS)}."),
    batch: int = typer.Option(0, min=0, help="Products in one call; 0: a plain one."),
    kernel: str = typer.Option("", help="Run this kernel, by name."),
    strategy: str = typer.Option("", help="Way to choose a kernel: auto, measured, heuristic, first_fit."),
    validate: bool = typer.Option(False, "--validate", help="Compare with float64 NumPy; exit code 1 if it is off."),
    repeat: int = typer.Option(20, min=1, help="Timed executions."),
    device: str = typer.Option("", help="Device: cpu:0, cuda:0, hip:0, ... Default: the server's."),
    seed: int = typer.Option(0, help="Seed of the data."),
    target: str = typer.Option("", help="Server. Default: your own if it runs, else a private one."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Multiply random matrices: C = activation(A x B)."""
    from tilewright_server.cli.private import connected

    case = cases.Case(m, n, k, dtype, layout, batch, activation, seed)
    if activation and activation not in cases.ACTIVATIONS:
        raise typer.BadParameter(f"use one of {', '.join(cases.ACTIVATIONS)}", param_hint="--activation")
    record: dict[str, Any] = {"problem": {"M": m, "N": n, "K": k, "batch": batch, "dtype": dtype, "layout": layout}}
    try:
        with connected(target) as client:
            record |= _run(client, case, out_dtype, kernel, strategy, device, validate, repeat)
    except Exception as error:
        code = getattr(error, "code", "")
        if not as_json or not isinstance(code, str) or not code:
            raise
        print_error(error)
        record |= {"status": "error", "error": {"code": code, "message": str(error)}}
        print_json(record)
        from tilewright_server.cli.exits import exit_for

        raise typer.Exit(exit_for(code)) from None
    if as_json:
        print_json(record)
    else:
        _show(case, record)
    if record["status"] != "success":
        raise typer.Exit(Exit.FAILED)


def _run(
    client: tilewright.Client,
    case: cases.Case,
    out_dtype: str,
    kernel: str,
    strategy: str,
    device: str,
    validate: bool,
    repeat: int,
) -> dict[str, Any]:
    a, b = case.operands(client)
    attributes = {"out_dtype": out_dtype or None, "unary": case.activation or None}
    chosen: dict[str, Any] = {"kernel": kernel or None, "strategy": strategy or None, "device": device or None}
    (out,) = client.run("gemm", {"a": a, "b": b}, attributes=attributes, **chosen).values()
    first = client.report
    assert first is not None, "a call that returned has a report"
    plan = client.plan("gemm", {"a": a, "b": b}, {"out": out}, attributes, **chosen)
    out.view("u1")[...] = 0xFF  # what is checked below is what the plan writes
    samples = []
    for _ in range(repeat):
        plan(a, b, out=out)
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
            "tflops": case.flops / device_ns / 1e3,
            "flops": case.flops,
            "repeat": repeat,
            "build_ms": first.timing.build_ns / 1e6,
            "bytes_copied": first.bytes_copied,
        },
        "validation": None,
        "status": "success",
    }
    if validate:
        found = cases.check(out, cases.reference(a, b, case.activation), case.k)
        record["validation"] = {
            "accuracy": found.accuracy,
            "max_error": found.max_error,
            "relative_error": found.error,
            "tolerance": found.tolerance,
            "correct_elements": found.correct,
            "total_elements": found.total,
        }
        record["status"] = "success" if found.ok else "failed"
    return record


def _show(case: cases.Case, record: dict[str, Any]) -> None:
    execution, validation = record["execution"], record["validation"]
    size = f"{case.m} x {case.n} x {case.k}" + (f", batch {case.batch}" if case.batch else "")
    rows = [
        ("problem", f"{size}, {case.dtype} {case.layout} {case.activation}".rstrip()),
        ("kernel", "\n".join(record["kernels"]) or "none: nothing to compute"),
        ("device", record["device"]),
        ("time", f"{execution['time_ms']:.4f} ms, the median of {execution['repeat']}"),
        ("speed", f"{execution['tflops'] * 1e3:.1f} GFLOP/s"),
        ("build", f"{execution['build_ms']:.0f} ms" if execution["build_ms"] else "was built already"),
    ]
    if validation:
        error = f"relative error {validation['relative_error']:.1e} (allowed {validation['tolerance']:.1e})"
        rows.append(("check", f"{record['status']}: {error}, {validation['accuracy']:.2f} % of elements within 2 %"))
    table("", ("", "gemm"), rows)
    if record["status"] != "success":
        note("the result is off")

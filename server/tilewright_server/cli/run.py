"""`tilewright run`: one operation on random data, timed, and checked if asked."""

from __future__ import annotations

from typing import Any

import typer

from tilewright_server.cli import cases, run_attention, run_conv, running
from tilewright_server.cli.output import examples

__all__ = ["app"]

app = typer.Typer(
    help="Run one operation on random data.",
    no_args_is_help=True,
    epilog=examples(
        "tilewright run gemm 512 512 512 --validate",
        "tilewright run conv 1 64 64 56x56 3x3 --padding 1 --validate",
        "tilewright run attention 2 8 128 64 --validate",
    ),
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
    words = {"M": m, "N": n, "K": k, "batch": batch, "dtype": dtype, "layout": layout}
    attributes = {"out_dtype": out_dtype or None, "unary": activation or None}
    chosen: dict[str, Any] = {"kernel": kernel or None, "strategy": strategy or None, "device": device or None}

    def run() -> dict[str, Any]:
        with connected(target) as client:
            a, b = case.operands(client)
            inputs = {"a": a, "b": b}
            record, out = running.execute(client, "gemm", inputs, attributes, chosen, case.flops, repeat)
            if validate:
                running.validate(record, out, cases.reference(a, b, activation), k)
            return record

    size = f"{m} x {n} x {k}" + (f", batch {batch}" if batch else "")
    problem = f"{size}, {dtype} {layout} {activation}".rstrip()
    running.report({"problem": words}, run, as_json, "gemm", problem)


app.command("conv", epilog=run_conv.EPILOG)(run_conv.conv)
app.command("attention", epilog=run_attention.EPILOG)(run_attention.attention)

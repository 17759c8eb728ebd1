"""`tilewright run`: one operation on random data, timed, and checked if asked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from tilewright_tools.cli.output import examples
from tilewright_tools.cli.problems import cases, run_attention, run_conv
from tilewright_tools.cli.problems.running import Job, ran

if TYPE_CHECKING:
    import tilewright

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
@ran(cases.arguments)
def gemm(
    fields: dict[str, Any],
    out_dtype: str = typer.Option("", "--out-dtype", help="Element type of C. Default: what the operation says."),
    activation: str = typer.Option("", help=f"One of {', '.join(cases.ACTIVATIONS)}."),
    batch: int = typer.Option(0, min=0, help="Products in one call; 0: a plain one."),
) -> Job:
    """Multiply random matrices: C = activation(A x B)."""
    if activation and activation not in cases.ACTIVATIONS:
        raise typer.BadParameter(f"use one of {', '.join(cases.ACTIVATIONS)}", param_hint="--activation")
    case = cases.Case(**fields, batch=batch, activation=activation)

    def operands(client: tilewright.Client, seed: int) -> dict[str, Any]:
        return dict(zip(("a", "b"), replace(case, seed=seed).operands(client), strict=True))

    def check(inputs: dict[str, Any], outputs: dict[str, Any]) -> cases.Check:
        (out,) = outputs.values()
        return cases.check(out, cases.reference(inputs["a"], inputs["b"], activation), case.k)

    size = f"{case.m} x {case.n} x {case.k}" + (f", batch {batch}" if batch else "")
    words = {"M": case.m, "N": case.n, "K": case.k, "batch": batch, "dtype": case.dtype, "layout": case.layout}
    return Job(
        operation="gemm",
        label=f"{size}, {case.dtype} {case.layout} {activation}".rstrip(),
        words=words,
        attributes={"out_dtype": out_dtype or None, "unary": activation or None},
        flops=case.flops,
        operands=operands,
        check=check,
    )


app.command("conv", epilog=run_conv.EPILOG)(run_conv.conv)
app.command("attention", epilog=run_attention.EPILOG)(run_attention.attention)

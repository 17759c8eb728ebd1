"""`tilewright bench attention`: build, check and time kernels of attention."""

from __future__ import annotations

import typer

from tilewright_tools.cli.output import examples
from tilewright_tools.cli.problems import sweeping as o

__all__ = ["EPILOG", "attention"]

EPILOG = examples(
    "tilewright bench attention --shapes performance --dtype fp32,bf16 --peer torch",
    "tilewright bench attention --shapes decode --dtype bf16 --page 0,64 --record",
    "tilewright bench attention --shapes performance --direction bwd --dtype bf16 --device cuda:0 --record",
    "tilewright bench attention --shapes 1x16x2048x128c,4x32/8x1/4096x128 --configs all --seconds 60",
)
_SHAPES = (
    "Comma-separated: files (CSV or JSON lines with batch, heads, seq_k, hdim and more), built-in lists (tiny, "
    "performance, decode), shapes such as 2x32/8x1/4096x128b (batch, heads of queries and of keys, queries and keys, "
    "elements of a head; c: causal, b: causal from the bottom right), or - for standard input."
)


@o.swept
def attention(
    shapes: str = typer.Option(..., "--shapes", help=_SHAPES),
    direction: str = typer.Option("fwd", help="Directions of rows that name none, comma-separated: fwd, bwd."),
    dtype: str = typer.Option("", help="Types of rows that name none, comma-separated. Default: fp32 on a CPU, bf16."),
    mask: str = typer.Option("no", help="Masks of rows that name none, comma-separated: no, top_left, bottom_right."),
    layout: str = typer.Option("bhsd", help="Layouts of rows that name none, comma-separated: bhsd, bshd."),
    page: str = typer.Option("0", help="Tokens of a page of rows that name none, comma-separated; 0: no pages."),
    batch: int = typer.Option(0, min=0, help="Sequences of every problem; 0: as its row says."),
) -> o.Problems:
    """Time kernels on attention or its gradients; exit code 1 if one is wrong, crashes, hangs or does not build."""
    columns = {"direction": direction, "dtype": dtype, "mask": mask, "layout": layout, "page": page}
    return o.Problems("attention", shapes, columns, {"batch": batch} if batch else {})

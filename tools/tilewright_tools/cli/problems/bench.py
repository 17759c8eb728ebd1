"""`tilewright bench`: build, check and time many kernels on many problems; keep what was measured."""

from __future__ import annotations

import typer

from tilewright_tools.cli.output import examples
from tilewright_tools.cli.problems import bench_attention, bench_conv
from tilewright_tools.cli.problems import sweeping as o

__all__ = ["app"]

app = typer.Typer(
    help="Build, check and time kernels on a device of this machine, without a server.",
    no_args_is_help=True,
    epilog=examples(
        "tilewright bench gemm --shapes decode --dtype bf16 --record",
        "tilewright bench conv --shapes resnet50 --direction fwd,bwd_data,bwd_weight --record",
        "tilewright bench attention --shapes performance --record",
    ),
)

_SHAPES = (
    "Comma-separated: files (CSV or JSON lines with m, n, k and more), built-in lists (tiny, squares, decode, prefill, "
    "skinny, deep, ragged, batched, large), shapes such as 128x4096x4096 or 16*64x64x64, or - for standard input."
)


@app.callback()
def root() -> None:
    """Build, check and time kernels on a device of this machine, without a server."""


@app.command(
    "gemm",
    epilog=examples(
        "tilewright bench gemm --shapes decode,squares --dtype bf16 --device cuda:0 --record",
        "tilewright bench gemm --shapes layers.csv --configs all --seconds 60 -o layers.parquet",
        "tilewright bench gemm --shapes 4096x4096x4096 --configs configs.jsonl --peer torch",
        "tilewright bench gemm --shapes prefill --limit 20 --resume -o prefill.csv",
        "tilewright bench gemm --shapes prefill --shard 2/8 --device cuda:1 --record",
        "tilewright bench gemm --shapes 1x4096x4096 --filter '*_mem_*' --flush-cache --json",
    ),
)
@o.swept
def gemm(
    shapes: str = typer.Option(..., "--shapes", help=_SHAPES),
    dtype: str = typer.Option("", help="Types of rows that name none, comma-separated. Default: fp32 on a CPU, bf16."),
    layout: str = typer.Option("rcr", help="Layouts of rows that name none, comma-separated."),
) -> o.Problems:
    """Time kernels on products; exit code 1 if one gives wrong results, crashes, hangs or does not build."""
    return o.Problems("gemm", shapes, {"dtype": dtype, "layout": layout})


app.command("conv", epilog=bench_conv.EPILOG)(bench_conv.conv)
app.command("attention", epilog=bench_attention.EPILOG)(bench_attention.attention)

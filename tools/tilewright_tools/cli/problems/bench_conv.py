"""`tilewright bench conv`: build, check and time kernels on convolutions and their gradients."""

from __future__ import annotations

import typer

from tilewright_tools.cli.output import examples
from tilewright_tools.cli.problems import sweeping as o

__all__ = ["EPILOG", "conv"]

EPILOG = examples(
    "tilewright bench conv --shapes resnet50 --dtype fp32,bf16 --batch 8 --peer torch",
    "tilewright bench conv --shapes performance --direction fwd,bwd_data --dtype fp16 --device cuda:0 --record",
    "tilewright bench conv --shapes 32x64x64x56x56:3s1p1,32x96x96x56x56:3p1g96 --configs all --seconds 60",
    "tilewright bench conv --shapes layers.csv -o layers.parquet",
)
_SHAPES = (
    "Comma-separated: files (CSV or JSON lines with n, c, k, size, filter and more), built-in lists (tiny, resnet50, "
    "resnext50, mobilenet_v2, conv3d, performance), shapes such as 32x64x64x56x56:3s1p1d1g1 (images, channels in and "
    "out, sizes; filter, stride, padding, dilation, groups), or - for standard input."
)


@o.swept
def conv(
    shapes: str = typer.Option(..., "--shapes", help=_SHAPES),
    direction: str = typer.Option(
        "fwd", help="Directions of rows that name none, comma-separated: fwd, bwd_data, bwd_weight."
    ),
    dtype: str = typer.Option("", help="Types of rows that name none, comma-separated. Default: fp32 on a CPU, bf16."),
    layout: str = typer.Option(
        "channels_last", help="Layouts of rows that name none, comma-separated: channels_last, channels_first."
    ),
    batch: int = typer.Option(0, min=0, help="Images of every problem; 0: as its row says."),
) -> o.Problems:
    """Time kernels on convolutions; exit code 1 if one gives wrong results, crashes, hangs or does not build."""
    columns = {"direction": direction, "dtype": dtype, "layout": layout}
    return o.Problems("conv", shapes, columns, {"n": batch} if batch else {})

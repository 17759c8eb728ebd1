"""`tilewright kernels explain conv`: which kernel a convolution or gradient would run, and why."""

from __future__ import annotations

import typer

from tilewright_server.cli import conv_cases as c
from tilewright_server.cli.output import examples, print_explanation, print_json

__all__ = ["EPILOG", "explain_conv"]

EPILOG = examples(
    "tilewright kernels explain conv 1 64 64 56x56 3x3 --padding 1",
    "tilewright kernels explain conv 32 256 256 14x14 3x3 --padding 1 --direction bwd_weight --dtype bf16 --json",
)


def explain_conv(
    images: c.Images,
    channels: c.Channels,
    out_channels: c.OutChannels,
    size: c.Size,
    taps: c.Filter,
    stride: c.Stride = "1",
    padding: c.Padding = "0",
    dilation: c.Dilation = "1",
    groups: c.Groups = 1,
    direction: c.Direction = "fwd",
    dtype: c.Dtype = "fp32",
    layout: c.Layout = "channels_last",
    strategy: str = typer.Option("", help="Way to choose a kernel."),
    kernel: str = typer.Option("", help="Why, or why not, this kernel."),
    device: str = typer.Option("", help="Device: cpu:0, cuda:0, hip:0, ... Default: the server's."),
    top: int = typer.Option(10, min=1, help="Candidates to print."),
    target: str = typer.Option("", help="Server. Default: your own if it runs, else a private one."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say which kernel a convolution would run, what was predicted of the others, and why the rest was refused."""
    from tilewright_server.cli.private import connected

    case = c.case_of(
        n=images, c=channels, k=out_channels, size=size, filter=taps, stride=stride, padding=padding,
        dilation=dilation, groups=groups, direction=direction, dtype=dtype, layout=layout,
    )  # fmt: skip
    _, _, request = c.load(case)
    with connected(target) as client:
        found = client.explain(
            case.operation,
            c.specs(request),
            attributes=request.attributes,
            strategy=strategy or None,
            kernel=kernel or None,
            device=device or None,
        )
    if as_json:
        print_json(found)
        return
    print_explanation(found, top)

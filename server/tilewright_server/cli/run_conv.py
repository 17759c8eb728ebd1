"""`tilewright run conv`: a convolution or one of its gradients on random data, timed, and checked if asked."""

from __future__ import annotations

from typing import Any

import typer

from tilewright_server.cli import conv_cases as c
from tilewright_server.cli import running
from tilewright_server.cli.output import examples

__all__ = ["EPILOG", "conv"]

EPILOG = examples(
    "tilewright run conv 1 64 64 56x56 3x3 --padding 1 --validate",
    "tilewright run conv 8 128 128 28x28 3x3 --padding 1 --groups 32 --dtype bf16 --direction bwd_weight",
    "tilewright run conv 1 96 96 112x112 3x3 --stride 2 --padding 1 --groups 96    depthwise",
    "tilewright run conv 1 16 32 8x28x28 3 --padding 1 --activation Relu --bias    three dimensions",
    "tilewright run conv 1 64 64 56x56 3x3 --layout channels_first --json",
    "tilewright run conv 32 64 64 56x56 3x3 --padding 1 --dtype fp16 --device cuda:0",
)


def conv(
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
    out_dtype: str = typer.Option("", "--out-dtype", help="Element type of the result. Default: the operation's."),
    bias: bool = typer.Option(False, "--bias", help="Add a bias for each output channel."),
    activation: str = typer.Option("", help=f"One of {', '.join(c.ACTIVATIONS)}."),
    accumulate: bool = typer.Option(False, "--accumulate", help="Add a gradient to an older one."),
    split_k: int = typer.Option(0, min=0, help="Parts that the sums are made in; 0: the planner decides."),
    kernel: str = typer.Option("", help="Run this kernel, by name."),
    strategy: str = typer.Option("", help="Way to choose a kernel: auto, measured, heuristic, first_fit."),
    validate: bool = typer.Option(False, "--validate", help="Compare with float64 NumPy; exit code 1 if it is off."),
    repeat: int = typer.Option(20, min=1, help="Timed executions."),
    device: str = typer.Option("", help="Device: cpu:0, cuda:0, hip:0, ... Default: the server's."),
    seed: int = typer.Option(0, help="Seed of the data."),
    target: str = typer.Option("", help="Server. Default: your own if it runs, else a private one."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Convolve random images, in one to three dimensions, or compute a gradient of that."""
    from tilewright_server.cli.private import connected

    if activation and activation not in c.ACTIVATIONS:
        raise typer.BadParameter(f"use one of {', '.join(c.ACTIVATIONS)}", param_hint="--activation")
    case = c.case_of(
        n=images, c=channels, k=out_channels, size=size, filter=taps, stride=stride, padding=padding,
        dilation=dilation, groups=groups, direction=direction, dtype=dtype, layout=layout, out_dtype=out_dtype,
        bias="yes" if bias else "", activation=activation, accumulate="yes" if accumulate else "", split_k=split_k,
    )  # fmt: skip
    operation, problem, request = c.load(case)
    chosen: dict[str, Any] = {"kernel": kernel or None, "strategy": strategy or None, "device": device or None}

    def run() -> dict[str, Any]:
        with connected(target) as client:
            inputs = c.operands(client, request, seed)
            attributes = request.attributes
            record, out = running.execute(client, case.operation, inputs, attributes, chosen, case.flops, repeat)
            if validate:
                running.validate(record, out, c.truth(operation, problem, inputs), case.depth)
            return record

    words = {
        "N": images, "C": channels, "K": out_channels, "size": size, "filter": taps, "stride": stride,
        "padding": padding, "dilation": dilation, "groups": groups, "direction": direction, "dtype": dtype,
        "layout": layout,
    }  # fmt: skip
    running.report({"problem": words}, run, as_json, case.operation, case.label)

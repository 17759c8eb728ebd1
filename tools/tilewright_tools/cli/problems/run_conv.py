"""`tilewright run conv`: a convolution or one of its gradients on random data, timed, and checked if asked."""

from __future__ import annotations

from typing import Any

import typer

from tilewright_tools.cli.output import examples
from tilewright_tools.cli.problems import cases
from tilewright_tools.cli.problems import conv_cases as c
from tilewright_tools.cli.problems.cases import Check
from tilewright_tools.cli.problems.running import Job, ran

__all__ = ["EPILOG", "conv"]

EPILOG = examples(
    "tilewright run conv 1 64 64 56x56 3x3 --padding 1 --validate",
    "tilewright run conv 8 128 128 28x28 3x3 --padding 1 --groups 32 --dtype bf16 --direction bwd_weight",
    "tilewright run conv 1 96 96 112x112 3x3 --stride 2 --padding 1 --groups 96    depthwise",
    "tilewright run conv 1 16 32 8x28x28 3 --padding 1 --activation Relu --bias    three dimensions",
    "tilewright run conv 1 64 64 56x56 3x3 --layout channels_first --json",
    "tilewright run conv 32 64 64 56x56 3x3 --padding 1 --dtype fp16 --device cuda:0",
)


@ran(c.arguments)
def conv(
    given: dict[str, Any],
    out_dtype: str = typer.Option("", "--out-dtype", help="Element type of the result. Default: the operation's."),
    bias: bool = typer.Option(False, "--bias", help="Add a bias for each output channel."),
    activation: str = typer.Option("", help=f"One of {', '.join(c.ACTIVATIONS)}."),
    accumulate: bool = typer.Option(False, "--accumulate", help="Add a gradient to an older one."),
    split_k: int = typer.Option(0, min=0, help="Parts that the sums are made in; 0: the planner decides."),
) -> Job:
    """Convolve random images, in one to three dimensions, or compute a gradient of that."""
    if activation and activation not in c.ACTIVATIONS:
        raise typer.BadParameter(f"use one of {', '.join(c.ACTIVATIONS)}", param_hint="--activation")
    case = c.case_of(
        **given, out_dtype=out_dtype, bias="yes" if bias else "", activation=activation,
        accumulate="yes" if accumulate else "", split_k=split_k,
    )  # fmt: skip
    operation, problem, request = c.load(case)

    def check(inputs: dict[str, Any], outputs: dict[str, Any]) -> Check:
        (out,) = outputs.values()
        return cases.check(out, c.truth(operation, problem, inputs), case.depth)

    return Job(
        operation=case.operation,
        label=case.label,
        words={name.upper() if len(name) == 1 else name: value for name, value in given.items()},
        attributes=request.attributes,
        flops=case.flops,
        operands=lambda client, seed: c.operands(client, request, seed),
        check=check,
    )

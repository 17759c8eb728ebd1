"""Convolutions for `run conv`, `kernels explain conv` and `demo`: the arguments that say which, operands in shared
memory, and the truth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import numpy.typing as npt

    import tilewright
    from tilewright_kit.contract.operation import Operation
    from tilewright_kit.contract.problem import OperationRequest
    from tilewright_kit.types.tensor import TensorDesc
    from tilewright_tools.tuning.problems.families.conv import ConvCase

    Array = npt.NDArray[Any]

__all__ = [
    "ACTIVATIONS",
    "arguments",
    "case_of",
    "load",
    "operands",
    "outcome",
    "specs",
    "truth",
]

ACTIVATIONS = ("Relu", "Gelu", "FastGelu", "Silu", "Sigmoid", "Tanh", "HardSwish")
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")

Images = Annotated[int, typer.Argument(metavar="N", help="Images.")]
Channels = Annotated[int, typer.Argument(metavar="C", help="Channels of x, of all groups.")]
OutChannels = Annotated[int, typer.Argument(metavar="K", help="Channels of y, of all groups.")]
Size = Annotated[str, typer.Argument(metavar="HxW", help="Spatial sizes of x, one to three: 56x56.")]
Filter = Annotated[str, typer.Argument(metavar="RxS", help="Sizes of the filter: 3x3, or 3 for all axes.")]
Stride = Annotated[str, typer.Option(help="Steps: 2, or 2x1.")]
Padding = Annotated[str, typer.Option(help="What is added around x: 1, 1x1, or before and behind: 0x0-1x1.")]
Dilation = Annotated[str, typer.Option(help="Distance of the filter's taps: 1, or 2x2.")]
Groups = Annotated[int, typer.Option(help="Groups; as many as channels: depthwise.")]
Direction = Annotated[
    str,
    typer.Option(
        help="fwd, or a gradient: bwd_data (of x), bwd_weight (of w).",
        autocompletion=lambda incomplete: [word for word in DIRECTIONS if word.startswith(incomplete)],
    ),
]
Dtype = Annotated[str, typer.Option(help="Element type: fp32, fp16, bf16, fp8, bf8, int8, mixed (x fp8, w bf8).")]
Layout = Annotated[str, typer.Option(help="Layout of all tensors: channels_last or channels_first.")]


def arguments(
    images: Images,
    channels: Channels,
    out_channels: OutChannels,
    size: Size,
    taps: Filter,
    stride: Stride = "1",
    padding: Padding = "0",
    dilation: Dilation = "1",
    groups: Groups = 1,
    direction: Direction = "fwd",
    dtype: Dtype = "fp32",
    layout: Layout = "channels_last",
) -> dict[str, Any]:
    """What a command's arguments say, as ``case_of`` takes it."""
    return {
        "n": images, "c": channels, "k": out_channels, "size": size, "filter": taps, "stride": stride,
        "padding": padding, "dilation": dilation, "groups": groups, "direction": direction, "dtype": dtype,
        "layout": layout,
    }  # fmt: skip


def case_of(**fields: Any) -> ConvCase:
    """The case, in words that mean something; whether it can be computed is the operation's to say.

    Raises ``InvalidArgumentError`` with the option's name.
    """
    from tilewright_kit.types.errors import InvalidArgumentError
    from tilewright_tools.tuning.problems.families.conv import ConvCase

    try:
        return ConvCase(**fields).written("the command line")
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            error.reason,
            field=error.field.removeprefix("shapes."),
            value=error.value,
            rule="conv_arguments",
            fix=error.fix,
        ) from None


def load(case: ConvCase) -> tuple[Operation[Any, Any], Any, OperationRequest]:
    """The operation, the problem and its request. Raises what the operation refuses."""
    from dataclasses import replace

    from tilewright_tools.cli.kernels.generate import load_operation

    operation = load_operation(case.operation)
    if case.direction != "fwd":  # a gradient of what cannot be computed: told in the terms of the convolution itself
        load_operation("conv").parse(
            replace(case, direction="fwd", accumulate="", dtype="fp32", out_dtype="").request()
        )
    request = case.request()
    return operation, operation.parse(request), request


def specs(request: OperationRequest) -> dict[str, tilewright.Spec]:
    """Descriptions of the inputs, without memory."""
    from tilewright import Spec

    return {name: Spec.of(desc.shape, desc.dtype.value, desc.strides) for name, desc in request.inputs.items()}


def operands(client: tilewright.Client, request: OperationRequest, seed: int = 0) -> dict[str, Array]:
    """The inputs in the client's shared memory, filled at random, laid out as the request says."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return {name: _operand(client, desc, rng) for name, desc in request.inputs.items()}


def _operand(client: tilewright.Client, desc: TensorDesc, rng: Any) -> Array:
    from tilewright_tools.tuning.measure.data import contents, view

    memory: Array = client.empty((desc.span,), desc.dtype.value)
    memory[...] = contents(desc, "normal", rng)
    return view(memory, desc)


def truth(operation: Operation[Any, Any], problem: Any, inputs: dict[str, Array]) -> Array:
    """The right output, in float64 (of whole numbers: exact)."""
    (found,) = operation.reference(problem, inputs).values()
    return found


def outcome(case: ConvCase) -> str:
    """Name of the output."""
    return {"fwd": "y", "bwd_data": "dx", "bwd_weight": "dw"}[case.direction]

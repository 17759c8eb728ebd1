"""Problems of the same kind with other sizes, for which the model is compared with measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.operands import NAMES, strides_in
from tilewright_grouped_conv.problem.parse import parse_conv
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.problem.sizes import Triple, output_size
from tilewright_grouped_conv.vocabulary import Direction, Scale
from tilewright_kit.contract.problem import Attribute, OperationRequest
from tilewright_kit.requests.describe import step_attributes
from tilewright_kit.types.errors import TilewrightError
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["resized_conv"]


def resized_conv(problem: ConvProblem, sizes: Mapping[str, int]) -> ConvProblem | None:
    """Other images, channels, groups and pixels under the same filter, stride, dilation and padding, without gaps.

    None if the sizes lack one of these, or fit no convolution.
    """
    geometry, ndim = problem.geometry, problem.ndim
    axes = ("depth", "height", "width")[3 - ndim :]
    if not {"images", "channels", "out_channels", "groups", *axes} <= set(sizes):
        return None
    n, c, k, groups = (sizes[name] for name in ("images", "channels", "out_channels", "groups"))
    pixels = [sizes[name] for name in axes]
    if min(groups, c, k, *pixels) < 1 or c % groups or k % groups:
        return None
    stays = (geometry.filter, geometry.stride, geometry.dilation, geometry.pad_begin, geometry.pad_end)
    outputs = [
        output_size(size, *numbers)
        for size, *numbers in zip(pixels, *(_own(item, ndim) for item in stays), strict=True)
    ]
    order = Order.FIRST if problem.channels_first else Order.LAST
    shapes = {
        "x": (n, c, *pixels),
        "w": (k, c // groups, *_own(geometry.filter, ndim)),
        "y": (n, k, *outputs),
    }
    names = NAMES[problem.direction]
    inputs = {
        name: _tensor(dtype.value, shapes[name.removeprefix("d")], order)
        for name, dtype in ((names.first, problem.dtype_in), (names.second, problem.dtype_wei))
    }
    output = shapes[names.output.removeprefix("d")]
    if problem.dtype_bias is not None:
        inputs["bias"] = TensorDesc.of(problem.dtype_bias, (output[1],))
    for index, dtype in enumerate(problem.dtype_d):
        inputs[f"d[{index}]"] = _tensor(dtype.value, output, order)
    if problem.scale is not Scale.NONE:
        inputs["scale"] = TensorDesc.of("fp32", (output[1],) if problem.scale is Scale.CHANNEL else ())
    if problem.accumulate:
        inputs["acc"] = _tensor(problem.dtype_out.value, output, order)
    attributes = _attributes(problem, sizes, groups)
    if problem.direction is Direction.BACKWARD_DATA:
        attributes["input_size"] = tuple(pixels)
    elif problem.direction is Direction.BACKWARD_WEIGHT:
        attributes["filter_size"] = _own(geometry.filter, ndim)
    try:
        return parse_conv(OperationRequest(problem.operation, inputs, {}, attributes), problem.direction)
    except TilewrightError:
        return None


def _own(numbers: Triple, ndim: int) -> tuple[int, ...]:
    return numbers[3 - ndim :]


def _tensor(dtype: str, shape: Sequence[int], order: Order) -> TensorDesc:
    return TensorDesc.of(dtype, shape, strides_in(order, shape))


def _attributes(problem: ConvProblem, sizes: Mapping[str, int], groups: int) -> dict[str, Attribute]:
    geometry, ndim = problem.geometry, problem.ndim
    return {
        "stride": _own(geometry.stride, ndim),
        "dilation": _own(geometry.dilation, ndim),
        "padding": (*_own(geometry.pad_begin, ndim), *_own(geometry.pad_end, ndim)),
        "groups": groups,
        "out_dtype": problem.dtype_out.value,
        "accumulate": problem.accumulate,
        "deterministic": problem.deterministic,
        "alignment": problem.alignment,
        "fast_accumulation": problem.fast_accumulation,
        **step_attributes(problem, sizes),
    }

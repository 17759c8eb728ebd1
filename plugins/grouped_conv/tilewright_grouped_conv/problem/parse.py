"""From a request to a problem: every check that a caller's mistake can fail, each with field, value, rule and fix."""

from __future__ import annotations

import math
from typing import Any

from tilewright_grouped_conv.problem.attributes import Attributes, pads_of, read_attributes
from tilewright_grouped_conv.problem.epilogue import read_epilogue
from tilewright_grouped_conv.problem.layout import filter_view, image_view
from tilewright_grouped_conv.problem.operands import Tensors, describe_output, order_like, read_tensors
from tilewright_grouped_conv.problem.problem import PROBLEMS, ConvProblem
from tilewright_grouped_conv.problem.sizes import ConvGeometry, Triple, extent, output_size, text_of
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.problem import Operand, OperationRequest, Role
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.requests.operands import check_dtype_agrees, check_pair
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import UnsupportedError
from tilewright_kit.types.tensor import MAX_ELEMENTS, TensorDesc, overlaps
from tilewright_kit.types.vocabulary import default_output, output_dtypes

__all__ = ["parse_conv"]

MAX_PHASES = 4096
"""Products that the gradient of an image may fall into."""
MAX_FLOPS = 2**62
_FLOATS = (DType.FP32, DType.FP16, DType.BF16)


def parse_conv(request: OperationRequest, direction: Direction) -> ConvProblem:
    """Check a request and infer what it left out. Raises ``InvalidArgumentError`` or ``UnsupportedError``."""
    tensors = read_tensors(request, direction)
    attributes = read_attributes(request.attributes, tensors.ndim, direction)
    geometry = _GEOMETRY[direction](tensors, attributes)
    _check_sizes(geometry, direction)
    output = _output(tensors, attributes, geometry, direction)
    epilogue, inputs, output = read_epilogue(tensors, attributes, geometry, direction, output)
    first, second = (inputs[name] for name in (tensors.names.first, tensors.names.second))
    _check_output_dtype(direction, tensors, first.dtype, output.dtype, epilogue["scale_view"] is not None)
    roles = {"x": "image", "dx": "image", "w": "filter", "dw": "filter", "y": "pixels", "dy": "pixels"}
    views: dict[str, Any] = {}
    for name, desc in ((tensors.names.first, first), (tensors.names.second, second), (tensors.names.output, output)):
        make = filter_view if roles[name] == "filter" else image_view
        views[roles[name]] = make(name, desc.shape, desc.strides, geometry.groups)
    return PROBLEMS[direction](
        geometry=geometry,
        dtype_in=first.dtype,
        dtype_wei=second.dtype,
        dtype_out=output.dtype,
        tensors=(
            *(Operand(name, desc, Role.INPUT) for name, desc in inputs.items()),
            Operand(tensors.names.output, output, Role.OUTPUT),
        ),
        alpha=attributes.alpha,
        accumulate=attributes.accumulate,
        unary=attributes.unary,
        clamp_lo=attributes.clamp_lo,
        clamp_hi=attributes.clamp_hi,
        split_k=attributes.split_k,
        deterministic=attributes.deterministic,
        alignment=attributes.alignment,
        fast_accumulation=attributes.fast_accumulation and first.dtype in (DType.FP8, DType.BF8),
        **views,
        **epilogue,
    )


# ---- sizes ----


def _forward(tensors: Tensors, attributes: Attributes) -> ConvGeometry:
    x, w = tensors.inputs["x"], tensors.inputs["w"]
    _positive("x", x, first=1)
    _positive("w", w)
    _check_groups(attributes.groups, x.shape[1], w.shape[0])
    _check_weights(w, x.shape[1], attributes.groups, "x")
    return _geometry(tensors, attributes, x.shape[0], x.shape[1], w.shape[0], _axes(x), _axes(w))


def _backward_data(tensors: Tensors, attributes: Attributes) -> ConvGeometry:
    dy, w, dx = tensors.inputs["dy"], tensors.inputs["w"], tensors.output
    _positive("dy", dy, first=1)
    _positive("w", w)
    groups = attributes.groups
    if w.shape[0] != dy.shape[1]:
        raise refuse(
            f"w has {w.shape[0]} output channels, but dy has {dy.shape[1]}",
            "w.shape",
            w.shape,
            "weight_shape",
            f"give weights [{dy.shape[1]}, C/groups, *filter], as the forward convolution has them",
        )
    channels = w.shape[1] * groups
    _check_groups(groups, channels, dy.shape[1])
    size = attributes.size
    if dx is not None:
        _positive("dx", dx, first=1)
        _same_images("dx", dx, dy)
        if dx.shape[1] != channels or size not in (None, _axes(dx)):
            spatial = _axes(dx) if size is None else size
            raise _wrong_output("dx", dx, (dy.shape[0], channels, *spatial[3 - tensors.ndim :]))
        size = _axes(dx)
    if size is None:
        raise _needed("input_size", "dx", tensors.ndim, "strides leave the size of the image open")
    geometry = _geometry(tensors, attributes, dy.shape[0], channels, dy.shape[1], size, _axes(w))
    _check_gradient(dy, geometry)
    phases = math.prod(min(stride, size) for stride, size in zip(geometry.stride, geometry.input, strict=True))
    if phases > MAX_PHASES:
        raise refuse(
            f"with these strides the gradient falls into {phases} products; at most {MAX_PHASES} are planned",
            "attributes.stride",
            text_of(geometry.stride, geometry.ndim),
            "phase_count",
            "use smaller strides: of a larger one most pixels have no gradient",
        )
    return geometry


def _backward_weight(tensors: Tensors, attributes: Attributes) -> ConvGeometry:
    x, dy, dw = tensors.inputs["x"], tensors.inputs["dy"], tensors.output
    _positive("x", x, first=1)
    _positive("dy", dy, first=1)
    _check_groups(attributes.groups, x.shape[1], dy.shape[1])
    if dy.shape[0] != x.shape[0]:
        raise refuse(
            f"dy has {dy.shape[0]} images, but x has {x.shape[0]}",
            "dy.shape",
            dy.shape,
            "gradient_shape",
            "give the gradient of the result for the very images in x",
        )
    per_group = x.shape[1] // attributes.groups
    size = attributes.size
    if dw is not None:
        _positive("dw", dw)
        if dw.shape[:2] != (dy.shape[1], per_group) or size not in (None, _axes(dw)):
            spatial = _axes(dw) if size is None else size
            raise _wrong_output("dw", dw, (dy.shape[1], per_group, *spatial[3 - tensors.ndim :]))
        size = _axes(dw)
    if size is None:
        raise _needed("filter_size", "dw", tensors.ndim, "strides leave the size of the filter open")
    geometry = _geometry(tensors, attributes, x.shape[0], x.shape[1], dy.shape[1], _axes(x), size)
    _check_gradient(dy, geometry)
    return geometry


_GEOMETRY = {
    Direction.FORWARD: _forward,
    Direction.BACKWARD_DATA: _backward_data,
    Direction.BACKWARD_WEIGHT: _backward_weight,
}


def _axes(desc: TensorDesc) -> Triple:
    depth, height, width = (1,) * (5 - len(desc.shape)) + desc.shape[2:]
    return (depth, height, width)


def _positive(name: str, desc: TensorDesc, first: int = 0) -> None:
    """Only images (``first`` 1) may be none at all."""
    if 0 in desc.shape[first:]:
        raise refuse(
            f"{name} has a size of zero",
            f"{name}.shape",
            desc.shape,
            "sizes_positive",
            "give channels and spatial axes of one or more"
            + (" (no images at all, N = 0, are legal)" if first else ""),
        )


def _check_groups(groups: int, channels: int, outputs: int) -> None:
    for count, what, rule in (
        (channels, "input channels", "groups_divide_channels"),
        (outputs, "output channels", "groups_divide_outputs"),
    ):
        if count % groups:
            common = math.gcd(channels, outputs)
            raise refuse(
                f"{count} {what} do not fall into {groups} equal groups",
                "attributes.groups",
                groups,
                rule,
                f"use a number that divides {channels} and {outputs}: {common} or one of its divisors",
            )


def _check_weights(w: TensorDesc, channels: int, groups: int, image: str) -> None:
    wanted = channels // groups
    if w.shape[1] == wanted:
        return
    other = channels // w.shape[1] if channels % w.shape[1] == 0 else 0
    would_do = bool(other) and w.shape[0] % other == 0
    fix = f"give weights [{w.shape[0]}, {wanted}, *filter]" + (f", or set groups={other}" if would_do else "")
    raise refuse(
        f"w has {w.shape[1]} channels per group, but {image} has {channels} channels in {groups} groups",
        "w.shape",
        w.shape,
        "weight_shape",
        fix,
    )


def _geometry(
    tensors: Tensors, attributes: Attributes, n: int, c: int, k: int, size: Triple, filter: Triple
) -> ConvGeometry:
    begin, end = pads_of(attributes, size, filter)
    stride, dilation = attributes.stride, attributes.dilation
    found = [output_size(*numbers) for numbers in zip(size, filter, stride, dilation, begin, end, strict=True)]
    for axis in range(3):
        if found[axis] < 1:
            lacking = extent(filter[axis], dilation[axis]) - size[axis] - begin[axis] - end[axis]
            raise refuse(
                f"a filter of {filter[axis]} taps at dilation {dilation[axis]} is longer than the padded image of "
                f"{size[axis] + begin[axis] + end[axis]} pixels along {_AXES[axis]}",
                "attributes.padding",
                [begin[axis], end[axis]],
                "filter_fits",
                f"pad {_AXES[axis]} by {lacking} more in all ({-(-lacking // 2)} on each side does), or use a smaller "
                "filter",
            )
    output = (found[0], found[1], found[2])
    return ConvGeometry(tensors.ndim, n, c, k, attributes.groups, size, filter, output, stride, dilation, begin, end)


_AXES = ("depth", "height", "width")


def _same_images(name: str, desc: TensorDesc, dy: TensorDesc) -> None:
    if desc.shape[0] != dy.shape[0]:
        raise refuse(
            f"dy has {dy.shape[0]} images, but {name} has {desc.shape[0]}",
            "dy.shape",
            dy.shape,
            "gradient_shape",
            "give the gradient of the result for the very images whose gradient is asked for",
        )


def _check_gradient(dy: TensorDesc, geometry: ConvGeometry) -> None:
    """dy's pixels are those that the forward convolution would have made."""
    have = _axes(dy)
    for axis in range(3):
        if have[axis] != geometry.output[axis]:
            wanted = text_of(geometry.output, geometry.ndim)
            raise refuse(
                f"dy has {have[axis]} pixels along {_AXES[axis]}, but an image of {geometry.input[axis]} under a "
                f"filter of {geometry.filter[axis]} gives {geometry.output[axis]}",
                "dy.shape",
                dy.shape,
                "gradient_shape",
                f"give dy {wanted} pixels, or correct the sizes, stride, padding and dilation; "
                + _sizes_that_fit(geometry, have[axis], axis),
            )


def _sizes_that_fit(geometry: ConvGeometry, outputs: int, axis: int) -> str:
    pads = geometry.pad_begin[axis] + geometry.pad_end[axis]
    least = (outputs - 1) * geometry.stride[axis] + extent(geometry.filter[axis], geometry.dilation[axis]) - pads
    most = least + geometry.stride[axis] - 1
    if most < 1:
        return "no image gives that many"
    least = max(least, 1)
    return f"images of {least}" + (f" to {most}" if most > least else "") + f" give {outputs}"


def _wrong_output(name: str, desc: TensorDesc, shape: tuple[int, ...]) -> Exception:
    return refuse(
        f"{name} has shape {list(desc.shape)}, but the gradient has {list(shape)}",
        f"{name}.shape",
        desc.shape,
        "output_shape",
        f"give an output of shape {list(shape)}",
    )


def _needed(attribute: str, output: str, ndim: int, why: str) -> Exception:
    return refuse(
        f"{attribute} is needed: {why}",
        f"attributes.{attribute}",
        "",
        "needed",
        f"give {ndim} numbers, or describe the output {output}",
    )


def _check_sizes(geometry: ConvGeometry, direction: Direction) -> None:
    """Every number of the implicit product stays exact in 64 bits: nothing is packed before this is known."""
    field = {Direction.BACKWARD_DATA: "attributes.input_size", Direction.BACKWARD_WEIGHT: "attributes.filter_size"}
    numbers = (
        geometry.n * geometry.c * geometry.in_pixels,
        geometry.n * geometry.k * geometry.out_pixels,
        geometry.k * geometry.cg * geometry.taps,
        *(
            size + begin + end
            for size, begin, end in zip(geometry.input, geometry.pad_begin, geometry.pad_end, strict=True)
        ),
    )
    if max(numbers) > MAX_ELEMENTS or geometry.flops > MAX_FLOPS:
        raise refuse(
            "the problem has more than 2**48 elements or 2**62 operations",
            field.get(direction, "x.shape"),
            text_of(geometry.input, geometry.ndim),
            "size_overflow",
            "split the problem",
        )


# ---- element types ----


def _output(tensors: Tensors, attributes: Attributes, geometry: ConvGeometry, direction: Direction) -> TensorDesc:
    names = tensors.names
    first, second = tensors.inputs[names.first], tensors.inputs[names.second]
    _check_pair(direction, names.first, first.dtype, names.second, second.dtype)
    shapes = {"y": geometry.shape_y, "dx": geometry.shape_x, "dw": geometry.shape_w}
    dtype = attributes.out_dtype or default_output(first.dtype)
    order = attributes.layout or order_like(first)
    shape, acc = shapes[names.output](), tensors.inputs.get("acc")
    like = acc if acc is not None and acc.shape == shape and not overlaps(acc) else None
    output = describe_output(tensors, shape, dtype, order, like)
    check_dtype_agrees(names.output, output, attributes.out_dtype)
    return output


def _check_pair(direction: Direction, first: str, a: DType, second: str, b: DType) -> None:
    check_pair("convolution", a, second, b, second)
    if direction is not Direction.FORWARD and a not in _FLOATS:
        raise UnsupportedError(
            f"gradients are computed in fp32, fp16 and bf16, not in {a}",
            field=f"{first}.dtype",
            value=a.value,
            rule="dtype_direction",
            fix="convert the operands to bf16: 8 bits are too few to sum gradients",
        )


def _check_output_dtype(direction: Direction, tensors: Tensors, a: DType, out: DType, scaled: bool) -> None:
    name = tensors.names.output
    field = f"{name}.dtype" if tensors.output is not None else "attributes.out_dtype"
    if direction is Direction.FORWARD:
        allowed = output_dtypes(a, scaled=True)
        if out == DType.INT8 and a == DType.INT8 and not scaled:
            raise refuse(
                "an int8 result is a scaled sum, and nothing says how it is scaled",
                field,
                out.value,
                "int8_output_scaled",
                "give scale (fp32, one value or one for each output channel), or take an int32 result",
            )
    else:
        allowed = tuple(dict.fromkeys((a, DType.FP32)))
    if out not in allowed:
        raise refuse(
            f"a convolution of {a} cannot write {out} here",
            field,
            out.value,
            "output_dtype",
            f"use one of: {', '.join(allowed)}",
        )

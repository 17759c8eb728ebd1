"""Convolutions for static analysis: which one a text means for a kernel, and what product its kernels compute."""

from __future__ import annotations

from math import prod

from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.abilities import Product, WorkShare
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.tiles.work_share import tile_share
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["conv_analysis_request", "conv_analysis_shape", "conv_product", "conv_share"]

_SIZES = {1: "4096", 2: "28x28", 3: "16x28x28"}


def conv_analysis_shape(config: ConvConfig) -> str:
    """A layer in the middle of a network: filters of three, 256 channels."""
    taps = "x".join(["3"] * config.ndim)
    return f"32,256,256,{_SIZES[config.ndim]},{taps},1,1,1"


def conv_analysis_request(config: ConvConfig, shape: str) -> OperationRequest:
    """The plain convolution of ``N,C,K,HxW,RxS,stride,pad,groups`` in the kernel's direction, types and layout.

    Raises ``InvalidArgumentError``.
    """
    try:
        n, c, k, size, taps, stride, pad, groups = shape.lower().split(",")
        images, channels, outputs, steps, pads, count = (int(item) for item in (n, c, k, stride, pad, groups))
        image, filter = (tuple(int(item) for item in part.split("x")) for part in (size, taps))
        rows = tuple((at + 2 * pads - tap) // steps + 1 for at, tap in zip(image, filter, strict=True))
        good = min(images, channels, outputs, count, *image, *filter, *rows) >= 1 and len(image) == config.ndim
    except (ValueError, ZeroDivisionError):
        good = False
    if not good:
        fix = f"write it as N,C,K,HxW,RxS,stride,pad,groups with {config.ndim} spatial axes"
        raise refuse("this is no convolution of the kernel", "shape", shape, "analysis_shape", fix)
    first, second = config.dtype_in, config.dtype_wei or config.dtype_in
    tensors = {
        "x": (images, channels, *image),
        "w": (outputs, channels // count, *filter),
        "dy": (images, outputs, *rows),
    }
    names = {
        Direction.FORWARD: ("x", "w"),
        Direction.BACKWARD_DATA: ("dy", "w"),
        Direction.BACKWARD_WEIGHT: ("x", "dy"),
    }[config.direction]
    inputs = {
        name: _tensor(str(dtype), tensors[name], first=config.channels_first)
        for name, dtype in zip(names, (first, second), strict=True)
    }
    attributes: dict[str, int | str | tuple[int, ...]] = {"stride": steps, "padding": pads, "groups": count}
    if config.direction is Direction.BACKWARD_DATA:
        attributes["input_size"] = image
    if config.direction is Direction.BACKWARD_WEIGHT:
        attributes["filter_size"] = filter
    if config.dtype_out:
        attributes["out_dtype"] = str(config.dtype_out)
    return OperationRequest(config.operation, inputs, {}, attributes)


def _tensor(dtype: str, shape: tuple[int, ...], *, first: bool) -> TensorDesc:
    if first:
        return TensorDesc.of(dtype, shape)
    strides, step = [1] * len(shape), shape[1]
    for axis in (*range(len(shape) - 1, 1, -1), 0):
        strides[axis], step = step, step * shape[axis]
    return TensorDesc.of(dtype, shape, tuple(strides))


def conv_product(problem: ConvProblem) -> Product:
    """The implicit product; phases of an image's gradient count as so many of the largest."""
    operands = [(item.desc, item.role.value) for item in problem.operands]
    return Product(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        batch=problem.batch * len(problem.phases()),
        dtype=problem.dtype_in,
        dtype_out=problem.dtype_out,
        bytes_in=sum(prod(desc.shape) * desc.dtype.bytes for desc, role in operands if role == "input"),
        bytes_out=sum(prod(desc.shape) * desc.dtype.bytes for desc, role in operands if role == "output"),
    )


def conv_share(problem: ConvProblem, config: ConvConfig, workgroups: int) -> WorkShare:  # noqa: ARG001
    """One tile of pixels and channels, or a slice of its reduction, after the other."""
    return tile_share(conv_product(problem), config.tile, config.split_k)

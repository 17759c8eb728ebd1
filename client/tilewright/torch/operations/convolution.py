"""``tilewright::conv``, its two gradients, and ``tilewright::conv_transpose``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.torch.connection import client
from tilewright.torch.tensors import channels_last, define, empty_image, operand, tensor

__all__ = ["conv", "conv_backward_data", "conv_backward_weight", "conv_transpose"]

Sizes = Sequence[Any]
_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"


def _common(stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> dict[str, Any]:
    return {"stride": list(stride), "padding": list(padding), "dilation": list(dilation), "groups": groups}


def _conv(x: Any, w: Any, bias: Any, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> Any:
    words = _common(stride, padding, dilation, groups)
    used: Any = client()
    return tensor(used.conv(operand(x), operand(w), bias=operand(bias), channels_last=channels_last(x), **words))


def _conv_shape(x: Any, w: Any, bias: Any, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> Any:
    del bias
    torch._check(x.shape[1] == w.shape[1] * groups, lambda: f"{x.shape[1]} channels do not fit the filter's")
    spatial = [
        (size + 2 * pad - gap * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, gap in zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    ]
    return empty_image(x, w.shape[0], spatial)


conv = define("conv", f"(Tensor x, Tensor w, Tensor? bias, {_GEOMETRY}) -> Tensor", _conv, _conv_shape)


def _backward_data(
    dy: Any, w: Any, input_size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Any:
    words = _common(stride, padding, dilation, groups)
    size = list(input_size)
    used: Any = client()
    found = used.conv_backward_data(operand(dy), operand(w), input_size=size, channels_last=channels_last(dy), **words)
    return tensor(found)


def _data_shape(dy: Any, w: Any, input_size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> Any:
    del stride, padding, dilation
    return empty_image(dy, w.shape[1] * groups, input_size)


conv_backward_data = define(
    "conv_backward_data",
    f"(Tensor dy, Tensor w, SymInt[] input_size, {_GEOMETRY}) -> Tensor",
    _backward_data,
    _data_shape,
    kept=None,
)


def _backward_weight(
    x: Any, dy: Any, filter_size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Any:
    words = _common(stride, padding, dilation, groups)
    used: Any = client()
    found = used.conv_backward_weight(
        operand(x), operand(dy), filter_size=list(filter_size), channels_last=False, **words
    )
    return tensor(found).contiguous()


def _weight_shape(
    x: Any, dy: Any, filter_size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Any:
    del stride, padding, dilation
    return x.new_empty((dy.shape[1], x.shape[1] // groups, *filter_size))


conv_backward_weight = define(
    "conv_backward_weight",
    f"(Tensor x, Tensor dy, SymInt[] filter_size, {_GEOMETRY}) -> Tensor",
    _backward_weight,
    _weight_shape,
    kept=None,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, bias, *ctx.geometry = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, w)


def _gradients(ctx: Any, dy: Any) -> Any:
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = conv_backward_data(dy, w, x.shape[2:], *ctx.geometry) if needs[0] else None
    dw = conv_backward_weight(x, dy, w.shape[2:], *ctx.geometry) if needs[1] else None
    return dx, dw, _over_pixels(dy) if ctx.biased and needs[2] else None, None, None, None, None


def _over_pixels(dy: Any) -> Any:
    return dy.sum((0, *range(2, dy.dim())))


conv.register_autograd(_gradients, setup_context=_keep)


def _transpose(
    x: Any, w: Any, bias: Any, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, output_padding: Sizes
) -> Any:
    words = _common(stride, padding, dilation, groups)
    used: Any = client()
    found = used.conv_transpose(
        operand(x),
        operand(w),
        bias=operand(bias),
        output_padding=list(output_padding),
        channels_last=channels_last(x),
        **words,
    )
    return tensor(found)


def _transpose_shape(
    x: Any, w: Any, bias: Any, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, output_padding: Sizes
) -> Any:
    del bias
    sizes = zip(x.shape[2:], w.shape[2:], stride, padding, dilation, output_padding, strict=True)
    spatial = [(size - 1) * step - 2 * pad + gap * (taps - 1) + more + 1 for size, taps, step, pad, gap, more in sizes]
    return empty_image(x, w.shape[1] * groups, spatial)


conv_transpose = define(
    "conv_transpose",
    f"(Tensor x, Tensor w, Tensor? bias, {_GEOMETRY}, SymInt[] output_padding) -> Tensor",
    _transpose,
    _transpose_shape,
)


def _keep_transpose(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w, bias, *ctx.geometry, _ = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, w)


def _transpose_gradients(ctx: Any, dy: Any) -> Any:
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = conv(dy, w, None, *ctx.geometry) if needs[0] else None
    dw = conv_backward_weight(dy, x, w.shape[2:], *ctx.geometry) if needs[1] else None
    return dx, dw, _over_pixels(dy) if ctx.biased and needs[2] else None, None, None, None, None, None


conv_transpose.register_autograd(_transpose_gradients, setup_context=_keep_transpose)

"""Functions by PyTorch's names and with its arguments, over the custom operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.torch.operations import convolution
from tilewright.torch.operations.attention import attention
from tilewright.torch.operations.gemm import gemm
from tilewright.torch.operations.weights import PackedWeight, gemm_packed

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "linear",
    "matmul",
    "scaled_dot_product_attention",
]

Sizes = int | Sequence[int]


def linear(input: Any, weight: Any, bias: Any = None, *, activation: str | None = None) -> Any:
    """``torch.nn.functional.linear``, with an activation in the same kernel. ``weight`` may be a ``PackedWeight``."""
    rows = input.reshape(-1, input.shape[-1])
    if isinstance(weight, PackedWeight):
        columns = weight.shape[1]
        found = gemm_packed(rows, weight.number, columns, bias, activation=activation)
        return found.reshape(*input.shape[:-1], columns)
    found = gemm(rows, weight.t(), bias, activation=activation)
    return found.reshape(*input.shape[:-1], weight.shape[0])


def matmul(input: Any, other: Any) -> Any:
    """``torch.matmul``."""
    left = input.unsqueeze(0) if input.dim() == 1 else input
    right = other.unsqueeze(1) if other.dim() == 1 else other
    found = gemm(left, right)
    found = found.squeeze(-1) if other.dim() == 1 else found
    return found.squeeze(-2 if other.dim() > 1 else -1) if input.dim() == 1 else found


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``torch.nn.functional.scaled_dot_product_attention`` for operands of four dimensions. Dropout is seeded by
    PyTorch's generator.
    """
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"there are {query.shape[1]} heads of queries and {key.shape[1]} of keys: give enable_gqa=True"
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=torch.float32).masked_fill(~attn_mask, -float("inf"))
    rng = None
    if dropout_p > 0:
        drawn = torch.randint(0, 2**31 - 1, (2,), dtype=torch.int32, device=query.device)
        rng = torch.cat([drawn, torch.zeros(2, dtype=torch.int32, device=query.device)])
    found, _ = attention(query, key, value, attn_mask, dropout_p, is_causal, scale, rng)
    return found


def _each(value: Sizes, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


def _conv(
    count: int, x: Any, w: Any, bias: Any, stride: Sizes, padding: Sizes | str, dilation: Sizes, groups: int
) -> Any:
    gaps = _each(dilation, count)
    if padding == "same":
        if any(step != 1 for step in _each(stride, count)):
            raise ValueError("padding='same' goes with a stride of 1")
        both = [gap * (taps - 1) for gap, taps in zip(gaps, w.shape[2:], strict=True)]
        if any(total % 2 for total in both):
            x = torch.nn.functional.pad(x, [part for total in reversed(both) for part in (0, total % 2)])
        pads = [total // 2 for total in both]
    else:
        pads = [0] * count if isinstance(padding, str) else _each(padding, count)
    return convolution.conv(x, w, bias, _each(stride, count), pads, gaps, groups)


def _transposed(
    count: int, x: Any, w: Any, bias: Any, stride: Sizes, padding: Sizes, more: Sizes, groups: int, dilation: Sizes
) -> Any:
    sizes = (_each(value, count) for value in (stride, padding, dilation))
    return convolution.conv_transpose(x, w, bias, *sizes, groups, _each(more, count))


def conv1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    """``torch.nn.functional.conv1d``, of a batch."""
    return _conv(1, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    """``torch.nn.functional.conv2d``, of a batch."""
    return _conv(2, input, weight, bias, stride, padding, dilation, groups)


def conv3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    """``torch.nn.functional.conv3d``, of a batch."""
    return _conv(3, input, weight, bias, stride, padding, dilation, groups)


def conv_transpose1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Any:
    """``torch.nn.functional.conv_transpose1d``, of a batch."""
    return _transposed(1, input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Any:
    """``torch.nn.functional.conv_transpose2d``, of a batch."""
    return _transposed(2, input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Any:
    """``torch.nn.functional.conv_transpose3d``, of a batch."""
    return _transposed(3, input, weight, bias, stride, padding, output_padding, groups, dilation)

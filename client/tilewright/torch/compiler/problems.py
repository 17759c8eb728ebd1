"""Problems that the backend may take over: each as done by Tilewright and as done by PyTorch, on the same operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tilewright.torch import functions
from tilewright.torch.operations.gemm import gemm

__all__ = ["ACTIVATIONS", "ATTENTION", "CONVOLUTION", "PRODUCT", "Kind"]

_functional = torch.nn.functional
ACTIVATIONS: dict[str | None, Any] = {
    None: lambda z: z,
    "relu": torch.relu,
    "gelu": _functional.gelu,
    "gelu_tanh": lambda z: _functional.gelu(z, approximate="tanh"),
    "silu": _functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class Kind(NamedTuple):
    """A kind of problem. Both functions take the operands in order, ``None`` for those left out, and the same words."""

    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    used: Callable[[Any], Any]
    """A use of the result as models have it, so that the layout that it is left in is paid for."""


def _product(a: Any, b: Any, bias: Any, addend: Any, *, linear: bool, activation: str | None) -> Any:
    right = b.t() if linear else b
    shape = (*a.shape[:-1], right.shape[-1])
    if right.dim() == 2 and a.dim() > 2:
        a = a.reshape(-1, a.shape[-1])
        addend = None if addend is None else addend.reshape(-1, shape[-1])
    found = gemm(a, right, bias, None, None if addend is None else [addend], activation=activation)
    return found.reshape(shape) if right.dim() == 2 else found


def _plain_product(a: Any, b: Any, bias: Any, addend: Any, *, linear: bool, activation: str | None) -> Any:
    if linear:
        found = _functional.linear(a, b, bias)
    else:
        found = torch.matmul(a, b) if bias is None else torch.addmm(bias, a, b)
    return ACTIVATIONS[activation](found if addend is None else found + addend)


def _convolution(x: Any, w: Any, bias: Any, *, sizes: Sequence[Any]) -> Any:
    ours = (functions.conv1d, functions.conv2d, functions.conv3d)[w.dim() - 3]
    return ours(x, w, bias, *sizes)


def _plain_convolution(x: Any, w: Any, bias: Any, *, sizes: Sequence[Any]) -> Any:
    return (torch.conv1d, torch.conv2d, torch.conv3d)[w.dim() - 3](x, w, bias, *sizes)


def _attention(q: Any, k: Any, v: Any, mask: Any, **words: Any) -> Any:
    return functions.scaled_dot_product_attention(q, k, v, mask, **words)


def _plain_attention(q: Any, k: Any, v: Any, mask: Any, **words: Any) -> Any:
    return _functional.scaled_dot_product_attention(q, k, v, mask, **words)


PRODUCT = Kind("product", _product, _plain_product, lambda y: y)
CONVOLUTION = Kind("convolution", _convolution, _plain_convolution, lambda y: y)
ATTENTION = Kind("attention", _attention, _plain_attention, lambda y: y.transpose(1, 2).contiguous())

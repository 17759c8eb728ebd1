"""The same convolution in PyTorch: what a sweep with ``--peer torch`` compares with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright_grouped_conv.commands.cases import ConvCase

__all__ = ["peer_call"]


def peer_call(torch: Any, case: ConvCase, operands: Mapping[str, Any]) -> Callable[[], object]:
    """The convolution with its bias, or one gradient; other epilogues are left out, which favours the peer.

    Raises ``NotImplementedError`` for padding that differs before and behind.
    """
    begins, ends = case.pads
    if begins != ends:
        raise NotImplementedError("padding that differs before and behind")
    torch.backends.cudnn.benchmark = True  # the peer at its best: it measures its algorithms at the first call
    geometry = (list(case.strides), list(begins), list(case.dilations))
    if case.direction == "fwd":
        x, w, bias = operands["x"], operands["w"], operands.get("bias")
        bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
        forward = getattr(torch.nn.functional, f"conv{case.ndim}d")
        return lambda: forward(x, w, bias, *geometry, case.groups)
    if case.direction == "bwd_data":
        dy, w = operands["dy"], operands["w"]
        x = _like(torch, case, dy, (case.n, case.c, *case.sizes))
    else:
        x, dy = operands["x"], operands["dy"]
        w = _like(torch, case, x, (case.k, case.c // case.groups, *case.filters))
    wanted = [case.direction == "bwd_data", case.direction == "bwd_weight", False]
    backward = torch.ops.aten.convolution_backward
    zeros = [0] * case.ndim
    place = 0 if case.direction == "bwd_data" else 1
    return lambda: backward(dy, x, w, None, *geometry, False, zeros, case.groups, wanted)[place]


def _like(torch: Any, case: ConvCase, other: Any, shape: tuple[int, ...]) -> Any:
    """A tensor that only has a shape and a layout: the gradient's own operand is not read."""
    desc = case.tensor("fp32", shape)
    return torch.empty_strided(shape, desc.strides, dtype=other.dtype, device=other.device)

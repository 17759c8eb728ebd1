"""``tilewright::gemm`` and ``tilewright::grouped_gemm``: products with their epilogues and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.torch.connection import client
from tilewright.torch.tensors import define, dtype_word, operand, operands, tensor, tensors

__all__ = ["gemm", "grouped_gemm"]

_EPILOGUE = """Tensor? bias=None, Tensor? c=None, Tensor[]? d=None, Tensor? scale_a=None, Tensor? scale_b=None, *,
 float alpha=1.0, str? binary=None, str? activation=None, ScalarType? out_dtype=None"""
_aten = torch.ops.aten
_DERIVATIVES: dict[str | None, Any] = {
    None: lambda g, z: g,
    "relu": lambda g, z: torch.where(z > 0, g, torch.zeros_like(g)),
    "gelu": lambda g, z: _aten.gelu_backward(g, z),
    "gelu_tanh": lambda g, z: _aten.gelu_backward(g, z, approximate="tanh"),
    "silu": lambda g, z: _aten.silu_backward(g, z),
    "sigmoid": lambda g, z: _aten.sigmoid_backward(g, torch.sigmoid(z)),
    "tanh": lambda g, z: _aten.tanh_backward(g, torch.tanh(z)),
    "hard_swish": lambda g, z: _aten.hardswish_backward(g, z),
}
"""Gradient of an activation's argument, out of that of its value and the argument."""


def _gemm(
    a: Any,
    b: Any,
    bias: Any = None,
    c: Any = None,
    d: Sequence[Any] | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
    *,
    alpha: float = 1.0,
    binary: str | None = None,
    activation: str | None = None,
    out_dtype: Any = None,
) -> Any:
    words: dict[str, Any] = {}
    for name, value in (("bias", bias), ("c", c), ("scale_a", scale_a), ("scale_b", scale_b)):
        if value is not None:
            words[name] = operand(value)
    if d:
        words["d"] = operands(d)
    if alpha != 1.0:
        words["alpha"] = alpha
    if binary is not None:
        words["binary"] = binary
    if activation is not None:
        words["activation"] = activation
    if out_dtype is not None:
        words["out_dtype"] = dtype_word(out_dtype)
    used: Any = client()
    found = used.gemm(operand(a), operand(b), **words)
    return tensor(found)


def _out_dtype(a: Any, out_dtype: Any) -> Any:
    if out_dtype is None and not (a.dtype.is_floating_point and a.dtype.itemsize > 1):
        raise TypeError(f"a product of {a.dtype} needs out_dtype")
    return out_dtype or a.dtype


def _gemm_shape(a: Any, b: Any, *_: Any, out_dtype: Any = None, **__: Any) -> Any:
    torch._check(a.shape[-1] == b.shape[-2], lambda: f"a has {a.shape[-1]} columns, b has {b.shape[-2]} rows")
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*lead, a.shape[-2], b.shape[-1]), dtype=_out_dtype(a, out_dtype))


gemm = define("gemm", f"(Tensor a, Tensor b, {_EPILOGUE}) -> Tensor", _gemm, _gemm_shape, kept=2)


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    a, b, bias, c, d, scale_a, scale_b = inputs
    ctx.words = {name: keyword_only_inputs[name] for name in ("alpha", "binary", "activation")}
    if scale_a is not None or scale_b is not None:
        ctx.words["activation"] = "scales"
    ctx.count = None if d is None else len(d)
    ctx.save_for_backward(a, b, bias, c, *(d or ()))


def _backward(ctx: Any, g: Any) -> Any:
    a, b, bias, c, *d = ctx.saved_tensors
    alpha, activation = ctx.words["alpha"], ctx.words["activation"]
    if ctx.words["binary"] == "multiply" or activation not in _DERIVATIVES:
        raise NotImplementedError(
            "there are no gradients of scaled or multiplied products, nor of this activation: do that step in PyTorch"
        )
    if activation is not None:
        z = gemm(a, b, bias, c, d or None, alpha=alpha, binary=ctx.words["binary"])
        g = _DERIVATIVES[activation](g.to(z.dtype), z)
    needs = [*ctx.needs_input_grad, *(False,) * 5]
    step = g.to(a.dtype).contiguous()
    da = _summed(gemm(step, b.mT, alpha=alpha), a) if needs[0] else None
    db = _summed(gemm(a.mT, step, alpha=alpha), b) if needs[1] else None
    dbias, dc = (_summed(g, value) if value is not None and value.requires_grad else None for value in (bias, c))
    dd = None if ctx.count is None else [_summed(g, value) if value.requires_grad else None for value in d]
    return (da, db, dbias, dc, dd, None, None)[: len(ctx.needs_input_grad)]


def _summed(gradient: Any, value: Any) -> Any:
    """The gradient of a tensor that was broadcast."""
    return gradient.sum_to_size(value.shape).to(value.dtype)


gemm.register_autograd(_backward, setup_context=_keep)


def _grouped_gemm(a: Sequence[Any], b: Sequence[Any], bias: Sequence[Any] | None = None, *, alpha: float = 1.0) -> Any:
    given = operands(bias) if bias else None
    used: Any = client()
    return list(tensors(used.grouped_gemm(operands(a), operands(b), bias=given, alpha=alpha)))


def _grouped_shapes(
    a: Sequence[Any], b: Sequence[Any], bias: Sequence[Any] | None = None, *, alpha: float = 1.0
) -> Any:
    del bias, alpha
    return [_gemm_shape(left, right) for left, right in zip(a, b, strict=True)]


grouped_gemm = define(
    "grouped_gemm",
    "(Tensor[] a, Tensor[] b, Tensor[]? bias=None, *, float alpha=1.0) -> Tensor[]",
    _grouped_gemm,
    _grouped_shapes,
)


def _keep_groups(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    a, b, bias = inputs
    ctx.count, ctx.biases, ctx.alpha = len(a), bias and len(bias), keyword_only_inputs["alpha"]
    ctx.save_for_backward(*a, *b)


def _grouped_backward(ctx: Any, gradients: Sequence[Any]) -> Any:
    a, b = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    steps = [gradient.contiguous() for gradient in gradients]
    da = grouped_gemm(steps, [each.mT for each in b], alpha=ctx.alpha)
    db = grouped_gemm([each.mT for each in a], steps, alpha=ctx.alpha)
    dbias = None if ctx.biases is None else [gradient.sum(0) for gradient in steps[: ctx.biases]]
    return (da, db, dbias)[: len(ctx.needs_input_grad)]


grouped_gemm.register_autograd(_grouped_backward, setup_context=_keep_groups)

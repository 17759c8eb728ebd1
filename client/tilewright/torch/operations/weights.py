"""Products with weights of other forms: ``tilewright::gemm_block_scaled``, ``gemm_int4``, ``gemm_packed``,
``moe_gemm`` and ``moe_gemm_quantised``.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from tilewright.torch.connection import client
from tilewright.torch.operations.gemm import gemm
from tilewright.torch.tensors import define, dtype_word, operand, tensor, tensors

__all__ = ["PackedWeight", "gemm_block_scaled", "gemm_int4", "gemm_packed", "moe_gemm", "moe_gemm_quantised"]

_GROUP = 128
"""Values along k that share a factor and a zero point."""


def _words(**given: Any) -> dict[str, Any]:
    """Arguments of the client's, as far as they are given."""
    return {
        name: operand(value) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
        if value is not None
    }


def _product_shape(a: Any, b: Any, columns: Any, out_dtype: Any) -> Any:
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*lead, a.shape[-2], columns), dtype=out_dtype or a.dtype)


# ---- fp8 with a factor for each block ----


def _block_scaled(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    *,
    blocks: str = "1x128_128x128",
    activation: str | None = None,
    out_dtype: Any,
) -> Any:
    words = _words(bias=bias, activation=activation)
    used: Any = client()
    found = used.gemm(
        operand(a),
        operand(b),
        scale_a=operand(scale_a),
        scale_b=operand(scale_b),
        scale_block=blocks,
        out_dtype=dtype_word(out_dtype),
        **words,
    )
    return tensor(found)


def _block_scaled_shape(a: Any, b: Any, *_: Any, out_dtype: Any, **__: Any) -> Any:
    torch._check(a.shape[-1] == b.shape[-2], lambda: f"a has {a.shape[-1]} columns, b has {b.shape[-2]} rows")
    return _product_shape(a, b, b.shape[-1], out_dtype)


gemm_block_scaled = define(
    "gemm_block_scaled",
    '(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, *, str blocks="1x128_128x128", '
    "str? activation=None, ScalarType out_dtype) -> Tensor",
    _block_scaled,
    _block_scaled_shape,
    kept=None,
)


# ---- 4-bit weights ----


def _int4(
    a: Any,
    b: Any,
    scale_b: Any,
    zero_b: Any = None,
    bias: Any = None,
    *,
    activation: str | None = None,
    out_dtype: Any = None,
) -> Any:
    words = _words(scale_b=scale_b, zero_b=zero_b, bias=bias, activation=activation, out_dtype=dtype_word(out_dtype))
    used: Any = client()
    return tensor(used.gemm(operand(a), operand(b), b_format="int4_128", **words))


def _int4_shape(a: Any, b: Any, *_: Any, out_dtype: Any = None, **__: Any) -> Any:
    torch._check(
        (a.shape[-1] + 1) // 2 == b.shape[-2],
        lambda: f"a has {a.shape[-1]} columns, and b {b.shape[-2]} rows of two values each",
    )
    return _product_shape(a, b, b.shape[-1], out_dtype)


gemm_int4 = define(
    "gemm_int4",
    "(Tensor a, Tensor b, Tensor scale_b, Tensor? zero_b=None, Tensor? bias=None, *, str? activation=None, "
    "ScalarType? out_dtype=None) -> Tensor",
    _int4,
    _int4_shape,
    kept=("b", "scale_b", "zero_b"),
)


def _values(b: Any, scale_b: Any, zero_b: Any, k: int) -> Any:
    """The weights ``[..., K, N]`` that 4-bit values stand for, in fp32."""
    pairs = b.view(torch.uint8)
    values = torch.stack([pairs & 15, pairs >> 4], -2).flatten(-3, -2)[..., :k, :]

    def spread(groups: Any) -> Any:
        return groups.to(torch.float32).mT.repeat_interleave(_GROUP, -2)[..., :k, :]

    return (values.to(torch.float32) - (8.0 if zero_b is None else spread(zero_b))) * spread(scale_b)


def _keep_int4(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    a, b, scale_b, zero_b, bias = inputs
    ctx.activation, ctx.k, ctx.dtype = keyword_only_inputs["activation"], a.shape[-1], a.dtype
    ctx.shape, ctx.bias = a.shape, None if bias is None else (bias.shape, bias.dtype)
    ctx.save_for_backward(b, scale_b, zero_b)


def _int4_gradients(ctx: Any, g: Any) -> Any:
    if ctx.activation is not None:
        raise NotImplementedError("there are no gradients of a product of 4-bit weights with an activation behind it")
    b, scale_b, zero_b = ctx.saved_tensors
    da = dbias = None
    if ctx.needs_input_grad[0]:
        step = g.to(ctx.dtype).contiguous()
        da = gemm(step, _values(b, scale_b, zero_b, ctx.k).to(ctx.dtype).mT).sum_to_size(ctx.shape)
    if ctx.bias is not None and ctx.needs_input_grad[4]:
        dbias = g.sum_to_size(ctx.bias[0]).to(ctx.bias[1])
    return (da, None, None, None, dbias)[: len(ctx.needs_input_grad)]


gemm_int4.register_autograd(_int4_gradients, setup_context=_keep_int4)


# ---- weights that were packed once ----

_numbers = itertools.count(1)
_packed: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()


class PackedWeight:
    """A second factor ``[K, N]`` in the order that kernels for about ``rows`` rows read fastest. The server keeps it,
    for this process, until the object goes. ``linear`` takes it for a weight.
    """

    def __init__(self, b: Any, rows: int | None = None) -> None:
        used: Any = client()
        self.packed = used.pack_b(operand(b), m_hint=rows)
        self.shape = tuple(b.shape)
        self.number = next(_numbers)
        """Its name to ``gemm_packed``."""
        _packed[self.number] = self

    def __repr__(self) -> str:
        return f"PackedWeight(shape={self.shape})"


def _gemm_packed(a: Any, number: int, columns: int, bias: Any = None, *, activation: str | None = None) -> Any:
    weight = _packed.get(number)
    if weight is None:
        raise ValueError(f"there is no packed weight {number} in this process: keep the PackedWeight")
    words = _words(bias=bias, activation=activation)
    used: Any = client()
    return tensor(used.gemm(operand(a), weight.packed, **words))


def _packed_shape(a: Any, number: int, columns: int, *_: Any, **__: Any) -> Any:
    return a.new_empty((*a.shape[:-1], columns))


gemm_packed = define(
    "gemm_packed",
    "(Tensor a, int number, SymInt columns, Tensor? bias=None, *, str? activation=None) -> Tensor",
    _gemm_packed,
    _packed_shape,
    kept=None,
)


# ---- experts ----


def _experts(
    x: Any,
    w: Any,
    counts: Any,
    scale_x: Any = None,
    scale_w: Any = None,
    *,
    blocks: str | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    expected_rows: int | None = None,
    **form: Any,
) -> Any:
    """The client's product, whose result has the given form."""
    words = _words(
        scale_x=scale_x,
        scale_w=scale_w,
        scale_block=blocks,
        activation=activation,
        expected_rows=expected_rows,
        **form,
    )
    used: Any = client()
    return used.moe_gemm(operand(x), operand(w), operand(counts), alpha=alpha, **words)


_EXPERTS = (
    "Tensor x, Tensor w, Tensor counts, Tensor? scale_x=None, Tensor? scale_w=None, *, str? blocks=None, "
    "str? activation=None, float alpha=1.0, int? expected_rows=None"
)


def _moe(*operands: Any, out_dtype: Any = None, **words: Any) -> Any:
    return tensor(_experts(*operands, out_dtype=dtype_word(out_dtype), **words))


def _moe_columns(w: Any, activation: str | None) -> Any:
    """Columns of the result: with a gate half of the weights' rows."""
    return w.shape[-2] if activation is None else w.shape[-2] // 2


def _moe_shape(x: Any, w: Any, *_: Any, activation: str | None = None, out_dtype: Any = None, **__: Any) -> Any:
    torch._check(x.shape[-1] == w.shape[-1], lambda: f"x has {x.shape[-1]} columns, w has {w.shape[-1]}")
    default = torch.float16 if x.dtype.itemsize == 1 else x.dtype  # of 8-bit floats
    return x.new_empty((*x.shape[:-1], _moe_columns(w, activation)), dtype=out_dtype or default)


moe_gemm = define(
    "moe_gemm",
    f"({_EXPERTS}, ScalarType? out_dtype=None) -> Tensor",
    _moe,
    _moe_shape,
    kept=3,
)


def _keep_moe(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    x, w, counts, scale_x, scale_w = inputs
    ctx.words = {name: keyword_only_inputs[name] for name in ("alpha", "expected_rows")}
    ctx.gated = keyword_only_inputs["activation"] is not None
    ctx.scaled, ctx.dtype = scale_x is not None or scale_w is not None, x.dtype
    ctx.save_for_backward(w, counts)


def _moe_gradients(ctx: Any, g: Any) -> Any:
    if ctx.scaled or ctx.gated or ctx.needs_input_grad[1]:
        raise NotImplementedError(
            "moe_gemm has the gradient of x, without scales and activation: experts' weights are not trained here"
        )
    w, counts = ctx.saved_tensors
    dx = moe_gemm(g.to(ctx.dtype).contiguous(), w.mT.contiguous(), counts, **ctx.words)
    # Rows of no expert had no part in the result; what the kernel leaves in them means nothing.
    rows = torch.arange(dx.shape[-2], device=dx.device)
    used = rows < (counts.sum() if dx.dim() == 2 else counts[:, None])
    dx = torch.where(used[..., None], dx, torch.zeros((), dtype=dx.dtype, device=dx.device))
    return (dx, None, None, None, None)[: len(ctx.needs_input_grad)]


moe_gemm.register_autograd(_moe_gradients, setup_context=_keep_moe)


def _moe_quantised(*operands: Any, **words: Any) -> Any:
    return tensors(_experts(*operands, out_scale_block="1x128", **words))


def _moe_quantised_shape(x: Any, w: Any, *_: Any, activation: str | None = None, **__: Any) -> Any:
    torch._check(x.shape[-1] == w.shape[-1], lambda: f"x has {x.shape[-1]} columns, w has {w.shape[-1]}")
    columns = _moe_columns(w, activation)
    values = x.new_empty((*x.shape[:-1], columns), dtype=torch.float8_e4m3fn)
    return values, x.new_empty((*x.shape[:-1], (columns + _GROUP - 1) // _GROUP), dtype=torch.float32)


moe_gemm_quantised = define(
    "moe_gemm_quantised",
    f"({_EXPERTS}) -> (Tensor, Tensor)",
    _moe_quantised,
    _moe_quantised_shape,
    kept=3,
)

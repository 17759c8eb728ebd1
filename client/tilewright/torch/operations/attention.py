"""``tilewright::attention`` with its gradients, over sequences of different lengths and over pages, and
``tilewright::kv_append``.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.torch.connection import client
from tilewright.torch.tensors import define, operand, tensor, tensors

__all__ = ["attention", "attention_backward", "attention_paged", "attention_varlen", "kv_append"]

_SCORES = "float dropout_p=0.0, bool is_causal=False, float? scale=None, Tensor? rng=None, str? mask=None"


def _attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    rng: Any = None,
    mask: str | None = None,
) -> Any:
    used: Any = client()
    found = used.attention(
        operand(q),
        operand(k),
        operand(v),
        operand(attn_mask),
        dropout_p,
        is_causal,
        scale,
        rng=operand(rng),
        mask=mask,
        return_lse=True,
    )
    o, lse = tensors(found)
    return o.contiguous(), lse


def _attention_shape(q: Any, k: Any, v: Any, *_: Any) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)


attention = define(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, {_SCORES}) -> (Tensor, Tensor)",
    _attention,
    _attention_shape,
    kept=2,
)


def _attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    rng: Any = None,
    mask: str | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Any:
    given = [operand(value) for value in (do, q, k, v, o, lse, attn_mask)]
    used: Any = client()
    found = used.attention_backward(
        *given,
        dropout_p,
        is_causal,
        scale,
        rng=operand(rng),
        mask=mask,
        cu_seqlens_q=operand(cu_seqlens_q),
        cu_seqlens_k=operand(cu_seqlens_k),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    return tuple(tensor(value).contiguous() for value in found[:3])


def _backward_shapes(do: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
    return tuple(value.new_empty(value.shape) for value in (q, k, v))


attention_backward = define(
    "attention_backward",
    "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? attn_mask=None, "
    f"{_SCORES}, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None) -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    _backward_shapes,
    kept=None,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, attn_mask, ctx.dropout_p, ctx.is_causal, ctx.scale, rng, ctx.mask = inputs
    ctx.save_for_backward(q, k, v, attn_mask, rng, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Any, _: Any) -> Any:
    q, k, v, attn_mask, rng, o, lse = ctx.saved_tensors
    if do is None:
        return (None,) * 9
    if attn_mask is not None and attn_mask.requires_grad:
        raise NotImplementedError("there is no gradient of attn_mask here: client.attention_backward has return_dbias")
    found = attention_backward(
        do.contiguous(), q, k, v, o, lse, attn_mask, ctx.dropout_p, ctx.is_causal, ctx.scale, rng, ctx.mask
    )
    return (*found, None, None, None, None, None, None)


attention.register_autograd(_gradients, setup_context=_keep)


def _attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    rng: Any = None,
    mask: str | None = None,
) -> Any:
    given = [operand(value) for value in (q, k, v, cu_seqlens_q, cu_seqlens_k)]
    used: Any = client()
    found = used.attention_varlen(
        *given, max_seqlen_q, max_seqlen_k, dropout_p, is_causal, scale, rng=operand(rng), mask=mask, return_lse=True
    )
    o, lse = tensors(found)
    return o.contiguous(), lse


def _varlen_shape(q: Any, k: Any, v: Any, *_: Any) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


attention_varlen = define(
    "attention_varlen",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, {_SCORES}) -> (Tensor, Tensor)",
    _attention_varlen,
    _varlen_shape,
)


def _keep_varlen(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, starts_q, starts_k, *ctx.longest, ctx.dropout_p, ctx.is_causal, ctx.scale, rng, ctx.mask = inputs
    ctx.save_for_backward(q, k, v, starts_q, starts_k, rng, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _varlen_gradients(ctx: Any, do: Any, _: Any) -> Any:
    q, k, v, starts_q, starts_k, rng, o, lse = ctx.saved_tensors
    if do is None:
        return (None,) * 12
    words = (ctx.dropout_p, ctx.is_causal, ctx.scale, rng, ctx.mask)
    found = attention_backward(do.contiguous(), q, k, v, o, lse, None, *words, starts_q, starts_k, *ctx.longest)
    return (*found, *(None,) * 9)


attention_varlen.register_autograd(_varlen_gradients, setup_context=_keep_varlen)


def _attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    seqlens_k: Any,
    is_causal: bool = False,
    scale: float | None = None,
    mask: str | None = None,
    prefix_table: Any = None,
    prefix_seqlens: Any = None,
    prefix_starts: Any = None,
) -> Any:
    given = [operand(value) for value in (q, k_pages, v_pages, block_table, seqlens_k)]
    used: Any = client()
    prefixes = {"prefix_table": prefix_table, "prefix_seqlens": prefix_seqlens, "prefix_starts": prefix_starts}
    prefixes = {name: operand(value) for name, value in prefixes.items() if value is not None}
    return tensor(used.attention_paged(*given, is_causal, scale, mask=mask, **prefixes)).contiguous()


def _paged_shape(q: Any, k_pages: Any, v_pages: Any, *_: Any) -> Any:
    return q.new_empty((*q.shape[:-1], v_pages.shape[-1]))


attention_paged = define(
    "attention_paged",
    "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seqlens_k, bool is_causal=False, "
    "float? scale=None, str? mask=None, Tensor? prefix_table=None, Tensor? prefix_seqlens=None, "
    "Tensor? prefix_starts=None) -> Tensor",
    _attention_paged,
    _paged_shape,
    kept=None,
)


def _kv_append(
    k_new: Any,
    v_new: Any,
    k_cache: Any,
    v_cache: Any,
    seqlens_k: Any,
    block_table: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary: str = "interleaved",
    k_descale: Any = None,
    v_descale: Any = None,
) -> None:
    given = [operand(value) for value in (k_new, v_new, k_cache, v_cache, seqlens_k)]
    used: Any = client()
    used.kv_append(
        *given,
        block_table=operand(block_table),
        rotary_cos=operand(rotary_cos),
        rotary_sin=operand(rotary_sin),
        rotary=rotary,
        k_descale=operand(k_descale),
        v_descale=operand(v_descale),
    )


def _nothing(*_: Any) -> None:
    return None


kv_append = define(
    "kv_append",
    "(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor seqlens_k, "
    'Tensor? block_table=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, str rotary="interleaved", '
    "Tensor? k_descale=None, Tensor? v_descale=None) -> ()",
    _kv_append,
    _nothing,
    ("k_cache", "v_cache"),
    kept=None,
)

"""Attention over latent caches, whose values are the first elements of their keys: ``tilewright::attention_latent`` and
``attention_latent_paged``.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.torch.connection import client
from tilewright.torch.tensors import define, operand, tensor

__all__ = ["attention_latent", "attention_latent_paged"]


def _latent(
    q: Any,
    k: Any,
    head_dim_v: int,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    mask: str | None = None,
) -> Any:
    used: Any = client()
    found = used.attention(
        operand(q),
        operand(k),
        None,
        operand(attn_mask),
        0.0,
        is_causal,
        scale,
        mask=mask,
        head_dim_v=head_dim_v,
    )
    return tensor(found).contiguous()


def _latent_shape(q: Any, k: Any, head_dim_v: int, *_: Any) -> Any:
    torch._check(q.shape[-1] == k.shape[-1], lambda: f"q has {q.shape[-1]} elements in a row, k {k.shape[-1]}")
    return q.new_empty((*q.shape[:-1], head_dim_v))


attention_latent = define(
    "attention_latent",
    "(Tensor q, Tensor k, int head_dim_v, Tensor? attn_mask=None, bool is_causal=False, float? scale=None, "
    "str? mask=None) -> Tensor",
    _latent,
    _latent_shape,
    kept=1,
)


def _latent_paged(
    q: Any,
    k_pages: Any,
    block_table: Any,
    seqlens_k: Any,
    head_dim_v: int,
    is_causal: bool = False,
    scale: float | None = None,
    mask: str | None = None,
) -> Any:
    pages, table, lengths = operand(k_pages), operand(block_table), operand(seqlens_k)
    used: Any = client()
    found = used.attention_paged(
        operand(q), pages, None, table, lengths, is_causal, scale, mask=mask, head_dim_v=head_dim_v
    )
    return tensor(found).contiguous()


def _latent_paged_shape(q: Any, k_pages: Any, block_table: Any, seqlens_k: Any, head_dim_v: int, *_: Any) -> Any:
    return q.new_empty((*q.shape[:-1], head_dim_v))


attention_latent_paged = define(
    "attention_latent_paged",
    "(Tensor q, Tensor k_pages, Tensor block_table, Tensor seqlens_k, int head_dim_v, bool is_causal=False, "
    "float? scale=None, str? mask=None) -> Tensor",
    _latent_paged,
    _latent_paged_shape,
    kept=None,
)

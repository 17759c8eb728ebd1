"""Attention as its definition says it, in float64, and its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np


def visible(rows: int, keys: int, *, right: int | None = None, left: int | None = None, bottom: bool = False) -> Any:
    i = np.arange(rows)[:, None] + (keys - rows if bottom else 0)
    j = np.arange(keys)[None]
    seen = np.ones((rows, keys), bool)
    if right is not None:
        seen &= j <= i + right
    if left is not None:
        seen &= j >= i - left
    return seen


def weights(q: Any, k: Any, seen: Any = None, bias: Any = 0.0, scale: float | None = None) -> tuple[Any, Any]:
    """Softmax of scores, and the logarithms of their sums; a row that sees nothing has weights 0 and -inf."""
    g = q.shape[1] // k.shape[1]
    keys = np.repeat(k.astype(np.float64), g, 1)
    scores = q.astype(np.float64) @ keys.swapaxes(-1, -2) * (scale or q.shape[-1] ** -0.5) + bias
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    most = np.where(np.isfinite(most), most, 0.0)
    part = np.exp(scores - most)
    total = part.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (most + np.log(total))[..., 0]
    return np.divide(part, total, out=np.zeros_like(part), where=total > 0), lse


def attend(q: Any, k: Any, v: Any, seen: Any = None, **more: Any) -> tuple[Any, Any]:
    p, lse = weights(q, k, seen, **more)
    return p @ np.repeat(v.astype(np.float64), q.shape[1] // v.shape[1], 1), lse


def gradients(do: Any, q: Any, k: Any, v: Any, seen: Any = None, **more: Any) -> tuple[Any, Any, Any]:
    p, _ = weights(q, k, seen, **more)
    g = q.shape[1] // k.shape[1]
    values, keys = (np.repeat(item.astype(np.float64), g, 1) for item in (v, k))
    do = do.astype(np.float64)
    dp = do @ values.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * (more.get("scale") or q.shape[-1] ** -0.5)

    def grouped(item: Any) -> Any:
        b, h, s, d = item.shape
        return item.reshape(b, h // g, g, s, d).sum(2)

    return ds @ keys, grouped(ds.swapaxes(-1, -2) @ q.astype(np.float64)), grouped(p.swapaxes(-1, -2) @ do)


def paged(array: Any, table: Any, length: int) -> Any:
    """Rows of one sequence out of pages [pages, size, heads, elements], as [1, heads, length, elements]."""
    pages = [array[page] for page in table[: -(-length // array.shape[1])]]
    return np.concatenate(pages)[:length].swapaxes(0, 1)[None]

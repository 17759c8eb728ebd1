"""The same attention in PyTorch: what a sweep with ``--peer torch`` compares with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright_fmha.commands.cases import AttentionCase

__all__ = ["peer_call", "torch_mask"]


def peer_call(torch: Any, case: AttentionCase, operands: Mapping[str, Any]) -> Callable[[], object]:
    """PyTorch's ``scaled_dot_product_attention``, or what autograd does of it backwards; where it has no such function
    (a soft cap, sinks, scores as a result), the plain operations; of new rows of a cache, assignments. Sequences end
    to end are as long as there is room, and so a batch of equal ones. Factors of 8-bit operands are left out.

    Raises ``NotImplementedError`` for keys and values in pages.
    """
    if case.direction == "append":
        return _append(torch, case, operands)
    if case.page:
        raise NotImplementedError("attention over pages")
    q, k, do = (_batched(case, operands.get(name), name) for name in ("q", "k", "do"))
    v = k[..., : case.values] if case.is_on("latent") else _batched(case, operands["v"], "v")
    attend = _plain(torch, case, operands) if _is_unfused(case) else _fused(torch, case, operands, q)
    if case.direction == "bwd":
        leaves = [item.detach().requires_grad_() for item in (q, k, v)]
        o = attend(*leaves)
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)
    return lambda: attend(q, k, v)


def _batched(case: AttentionCase, tensor: Any, name: str) -> Any:
    """[batch, heads, rows, elements]"""
    if tensor is None or not case.is_varlen:
        return tensor
    rows = case.seq_k if name in ("k", "v") else case.queries
    return tensor.reshape(case.batch, rows, *tensor.shape[1:]).transpose(1, 2)


def _is_unfused(case: AttentionCase) -> bool:
    return bool(case.softcap) or case.is_on("sinks") or case.is_on("scores")


def _scale(case: AttentionCase) -> float:
    return float(case.scale) if case.scale else float(case.hdim**-0.5)


def _fused(torch: Any, case: AttentionCase, operands: Mapping[str, Any], q: Any) -> Callable[..., Any]:
    mask, causal = _added(torch, case, operands, q.device), False
    if mask is None:
        causal = case.mask == "top_left" or (case.mask == "bottom_right" and case.queries == case.seq_k)
        if case.window or (case.mask == "bottom_right" and not causal and case.queries > 1):
            mask, causal = torch_mask(torch, case, q.device), False
    else:
        mask = mask.masked_fill(~torch_mask(torch, case, q.device), float("-inf")).to(q.dtype)
    more: dict[str, Any] = {"enable_gqa": True} if case.kv_heads != case.heads else {}
    more |= {"scale": _scale(case), "dropout_p": float(case.dropout or 0)}
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda q, k, v: attend(q, k, v, attn_mask=mask, is_causal=causal, **more)


def _plain(torch: Any, case: AttentionCase, operands: Mapping[str, Any]) -> Callable[..., Any]:
    """Scores, softmax and the second product as operations of their own; all that is asked for."""
    group, cap, drop = case.heads // case.kv_heads, float(case.softcap or 0), float(case.dropout or 0)
    sinks = operands.get("sinks")

    def attend(q: Any, k: Any, v: Any) -> Any:
        k, v = (item.repeat_interleave(group, 1) if group > 1 else item for item in (k, v))
        scores = (q @ k.mT).float() * _scale(case)
        scores = cap * torch.tanh(scores / cap) if cap else scores
        added = _added(torch, case, operands, q.device)
        scores = scores if added is None else scores + added
        scores = scores.masked_fill(~torch_mask(torch, case, q.device), float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
        weights = torch.softmax(scores, -1)[..., : k.shape[2]].to(v.dtype)
        return torch.nn.functional.dropout(weights, drop) @ v if drop else weights @ v

    return attend


def _added(torch: Any, case: AttentionCase, operands: Mapping[str, Any], device: Any) -> Any:
    """Bias and slopes that are added to scores, in fp32; None for neither."""
    found = operands["bias"].float() if "bias" in operands else None
    if "alibi_slopes" in operands:
        rows = torch.arange(case.queries, device=device)[:, None]
        off = case.seq_k - case.queries if case.mask == "bottom_right" else 0
        away = (rows + off - torch.arange(case.seq_k, device=device)[None]).abs()
        slopes = -operands["alibi_slopes"][None, :, None, None] * away
        found = slopes if found is None else found + slopes
    return found


def torch_mask(torch: Any, case: AttentionCase, device: Any) -> Any:
    """Which keys a query sees, [Sq, Sk] of bools."""
    rows = torch.arange(case.queries, device=device)[:, None]
    columns = torch.arange(case.seq_k, device=device)[None]
    rows = rows + (case.seq_k - case.queries if case.mask == "bottom_right" else 0)
    left, right = map(int, case.window.split(",")) if case.window else (-1, -1)
    if case.mask not in ("", "no"):
        right = 0
    seen = torch.ones(case.queries, case.seq_k, dtype=torch.bool, device=device)
    if right >= 0:
        seen &= columns <= rows + right
    if left >= 0:
        seen &= (columns >= rows - left) | (columns < case.sink_size)
    return seen


def _append(torch: Any, case: AttentionCase, operands: Mapping[str, Any]) -> Callable[[], object]:
    """Assignments of the new rows, those of keys rotated, to the caches."""
    first, count = case.seq_k - case.queries, case.queries
    places = torch.arange(first, case.seq_k, device=operands["k_new"].device)
    tables = [operands[f"rotary_{name}"][places] for name in ("cos", "sin")] if case.is_on("rope") else []

    def rows(name: str) -> Any:
        new = operands[f"{name}_new"]
        if name == "k" and tables:
            new = _rotated(torch, case, new, *tables)
        divisor = operands.get(f"{name}_descale")
        return (new if divisor is None else new / divisor).to(operands[f"{name}_past"].dtype)

    def run() -> None:
        for name in ("k", "v"):
            cache, new = operands[f"{name}_past"], rows(name)
            if case.page:
                pages = operands["block_table"].long()[:, places // case.page]
                cache[pages, places % case.page] = new.transpose(1, 2)
            else:
                cache[:, :, first : first + count] = new

    return run


def _rotated(torch: Any, case: AttentionCase, rows: Any, cos: Any, sin: Any) -> Any:
    """Rows [batch, heads, rows, elements] rotated by tables [rows, pairs]."""
    if case.rope == "interleaved":
        x0, x1 = rows[..., 0::2], rows[..., 1::2]
        return torch.stack([x0 * cos - x1 * sin, x0 * sin + x1 * cos], -1).flatten(-2).to(rows.dtype)
    x0, x1 = rows.chunk(2, -1)
    return torch.cat([x0 * cos - x1 * sin, x0 * sin + x1 * cos], -1).to(rows.dtype)

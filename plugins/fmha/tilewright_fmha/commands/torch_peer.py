"""The same attention in PyTorch: what a sweep with ``--peer torch`` compares with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright_fmha.commands.cases import AttentionCase

__all__ = ["peer_call", "torch_mask"]


def peer_call(torch: Any, case: AttentionCase, operands: Mapping[str, Any]) -> Callable[[], object]:
    """PyTorch's ``scaled_dot_product_attention``, or what autograd does of it backwards. Raises
    ``NotImplementedError`` for what it has no fast way for.
    """
    if case.page:
        raise NotImplementedError("attention over pages")
    q, k = operands["q"], operands["k"]
    v = operands["v"] if "v" in operands else k[..., : case.values]
    causal = case.mask == "top_left" or (case.mask == "bottom_right" and case.queries == case.seq_k)
    mask = None
    if case.window or (case.mask == "bottom_right" and not causal and case.queries > 1):
        mask, causal = torch_mask(torch, case, q.device), False
    attend = torch.nn.functional.scaled_dot_product_attention
    more = {"enable_gqa": True} if case.kv_heads != case.heads else {}
    if case.direction == "bwd":
        leaves = [item.detach().requires_grad_() for item in (q, k, v)]
        o = attend(*leaves, attn_mask=mask, is_causal=causal, **more)
        return lambda: torch.autograd.grad(o, leaves, operands["do"], retain_graph=True)
    return lambda: attend(q, k, v, attn_mask=mask, is_causal=causal, **more)


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
        seen &= columns >= rows - left
    return seen

"""Arguments that calls of attention share, with their defaults; ``attention`` says what they mean."""

from __future__ import annotations

from typing import Any

from tilewright.operations.call import CHOICE, Choice
from tilewright.types.dtypes import DTypeLike

__all__ = ["BACKWARD", "FORWARD", "PAGED", "Backward", "Forward", "Paged"]


class _Scores(Choice, total=False):
    """Arguments that make scores and weights: all passes take it."""

    mask: str | None
    window: Any
    mask_align: str | None
    bias: Any
    alibi_slopes: Any
    softcap: float | None
    sinks: Any
    sink_size: int
    seed: int | None
    offset: int
    rng: Any
    seqlens_q: Any


class Paged(_Scores, total=False):
    """Further arguments of forward passes: factors of 8-bit operands, splits, and what comes back."""

    return_lse: bool
    return_randval: bool
    return_status: bool
    return_rng: bool
    q_descale: Any
    k_descale: Any
    v_descale: Any
    qscale: str | None
    scale_block_q: int | None
    scale_block_k: int | None
    head_dim_v: int | None
    num_splits: int | None
    out_dtype: DTypeLike | None
    out: Any
    lse: Any


class Forward(Paged, total=False):
    """Where keys are not in pages, whose lengths must be given, and whose scores are no output."""

    seqlens_k: Any
    return_scores: str | None


class Backward(_Scores, total=False):
    seqlens_k: Any


_SCORES: dict[str, Any] = {
    "mask": None, "window": None, "mask_align": None, "bias": None, "alibi_slopes": None, "softcap": None,
    "sinks": None, "sink_size": 0, "seed": None, "offset": 0, "rng": None, "seqlens_q": None,
}  # fmt: skip
_RESULTS: dict[str, Any] = {
    "return_lse": False, "return_randval": False, "return_status": False, "return_rng": False, "q_descale": None,
    "k_descale": None, "v_descale": None, "qscale": None, "scale_block_q": None, "scale_block_k": None,
    "head_dim_v": None, "num_splits": None, "out_dtype": None, "out": None, "lse": None,
}  # fmt: skip
BACKWARD: dict[str, Any] = {**_SCORES, "seqlens_k": None, **CHOICE}
PAGED: dict[str, Any] = {**_SCORES, **_RESULTS, **CHOICE}
FORWARD: dict[str, Any] = {**_SCORES, "seqlens_k": None, "return_scores": None, **_RESULTS, **CHOICE}

"""The truth of one head of attention from plain arrays, apart from problems and their operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.problem.masks import Mask
from tilewright_fmha.problem.philox import random_bytes
from tilewright_fmha.references.forward import score, softmax_of, weighted

__all__ = ["attention_truth"]

Array = npt.NDArray[Any]
_EVERYTHING = Mask()


def attention_truth(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask = _EVERYTHING,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    slope: float = 0.0,
    sink: float | None = None,
    drop_below: int = 0,
    seed: int = 0,
    offset: int = 0,
    batch_head: int = 0,
    descale: tuple[Any, Any, Any] = (1.0, 1.0, 1.0),
    present: Any = True,
) -> tuple[Array, Array]:
    """``o`` [queries, Dv] and ``lse`` [queries] of one head of one sequence, from plain arrays.

    ``bias`` broadcasts to [queries, keys]; ``slope`` is ALiBi's; ``sink`` a learned sink's logit; ``descale`` the
    factors of q, k and v, each one number or one for each row; ``present`` says which keys are there at all.
    """
    queries, keys = len(q), len(k)
    with np.errstate(invalid="ignore", over="ignore"):
        q, k, v = (_rows(array, factor) for array, factor in zip((q, k, v), descale, strict=True))
        scale = q.shape[1] ** -0.5 if scale is None else scale
        s = score(q, k, scale, softcap, bias, slope, mask.offset(queries, keys))
        visible = mask.visible(queries, keys) & np.asarray(present)
        p, lse = softmax_of(s, visible, sink)
        if drop_below:
            kept = random_bytes(seed, offset, batch_head, queries, keys) >= drop_below
            p = np.where(kept, p * (256 / (256 - drop_below)), 0.0)
        o = weighted(p, v, visible)
    return o, lse


def _rows(array: Array, factor: Any) -> Array:
    wide = np.asarray(array).astype(np.float64)
    scale = np.asarray(factor, np.float64)
    return wide * (scale[:, None] if scale.ndim else scale)

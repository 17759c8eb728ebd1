"""The same attention in float32 NumPy: what the demonstration times beside ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.commands.cases import AttentionCase

__all__ = ["numpy_attention"]

Array = npt.NDArray[Any]


def numpy_attention(case: AttentionCase, inputs: Mapping[str, Array]) -> Callable[[], object]:
    """The same in float32 NumPy, with all scores at a time; masks are left out, which favours it."""
    group = case.heads // case.kv_heads
    arrays: dict[str, Array] = {
        name: inputs[name].astype(np.float32) for name in ("q", "k", "v", "do") if name in inputs
    }
    if "v" not in arrays:
        arrays["v"] = arrays["k"][..., : case.values]
    if case.page:
        table = inputs["block_table"]
        for name in "kv":
            pages = arrays[name][np.maximum(table, 0)]
            arrays[name] = pages.reshape(case.batch, -1, *pages.shape[-2:]).swapaxes(1, 2)[:, :, : case.seq_k]
    elif case.is_varlen:
        arrays = {name: array.swapaxes(0, 1)[None] for name, array in arrays.items()}
    q, k, v = arrays["q"], *(np.repeat(arrays[name], group, 1) for name in "kv")
    if case.is_varlen:
        starts = [list(map(int, inputs[f"cu_seqlens_{name}"])) for name in "qk"]
        pieces = [
            (q[:, :, a:b], k[:, :, c:d], v[:, :, c:d])
            for (a, b), (c, d) in zip(*map(itertools.pairwise, starts), strict=True)
        ]
    else:
        pieces = [(q, k, v)]
    scale = np.float32(case.hdim**-0.5)

    def weights(q: Array, k: Array) -> Array:
        scores: Array = q @ k.swapaxes(-1, -2) * scale
        scores -= scores.max(-1, keepdims=True, initial=-1e30)
        np.exp(scores, out=scores)
        scores /= np.maximum(scores.sum(-1, keepdims=True), np.float32(1e-30))
        return scores

    def forward() -> object:
        return [weights(q, k) @ v for q, k, v in pieces]

    def backward() -> object:
        do = arrays["do"]
        p = weights(q, k)
        dp = do @ v.swapaxes(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do

    return backward if case.direction == "bwd" else forward

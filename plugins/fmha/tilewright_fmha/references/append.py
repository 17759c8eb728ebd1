"""The truth of appending to a cache, in NumPy float64: new rows behind the old ones, rotated by their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.sequences import pages_of
from tilewright_fmha.vocabulary import KvLayout, Rope

__all__ = ["reference_append", "rotate"]

Array = npt.NDArray[Any]
_MOST = 448.0
"""Largest fp8 (E4M3): what lies beyond becomes that."""


def rotate(rows: Array, cos: Array, sin: Array, rope: Rope) -> Array:
    """``rows`` [..., elements] rotated by tables [..., pairs]: neighbours together, or the halves of a head."""
    wide = np.array(rows, np.float64)
    pairs = cos.shape[-1]
    if rope is Rope.NONE or not pairs:
        return wide
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if rope is Rope.INTERLEAVED
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    x0, x1 = wide[..., first].copy(), wide[..., second].copy()
    wide[..., first], wide[..., second] = x0 * cos - x1 * sin, x0 * sin + x1 * cos
    return wide


def reference_append(problem: FmhaProblem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The caches with the new rows in them, rotated queries, and lengths after. Rows without room are dropped."""
    out = {
        "k_cache": np.array(inputs["k_past"]).astype(np.float64),
        "v_cache": np.array(inputs["v_past"]).astype(np.float64),
    }
    if problem.has("q"):
        out["q_out"] = np.zeros(problem.operand("q").desc.shape)
    lengths = np.asarray(inputs["seqlens_k"]).astype(np.int64)
    after = lengths.copy()
    for b in range(problem.batch):
        first, count = _new_rows(problem, inputs, b)
        before = min(max(int(lengths[b]), 0), problem.seq_k)
        places = np.arange(before, before + count)
        after[b] = min(before + count, problem.seq_k)
        cos, sin = _tables(problem, inputs, places)
        for name in ("k", "v"):
            rows = _rows(problem, inputs[f"{name}_new"], b, first, count)
            if name == "k":
                rows = rotate(rows, cos[:, None], sin[:, None], problem.rope)
            if problem.scaling is not None:
                rows = np.clip(rows / _divisors(inputs, name, b), -_MOST, _MOST)
            _store(problem, inputs, out[f"{name}_cache"], name, b, places, rows)
        if "q_out" in out:
            turned = rotate(_rows(problem, inputs["q"], b, first, count), cos[:, None], sin[:, None], problem.rope)
            if problem.varlen:
                out["q_out"][first : first + count] = turned
            else:
                out["q_out"][b, :, :count] = turned.swapaxes(0, 1)
    if problem.has("seqlens_out"):
        out["seqlens_out"] = after
    if problem.has("status"):
        out["status"] = np.zeros(4, np.int64)
    return out


def _new_rows(problem: FmhaProblem, inputs: Mapping[str, Array], b: int) -> tuple[int, int]:
    if not problem.varlen:
        return 0, problem.new_rows
    first, last = (min(max(int(end), 0), problem.total_q) for end in np.asarray(inputs["cu_seqlens_q"])[b : b + 2])
    return first, min(max(last - first, 0), problem.new_rows)


def _rows(problem: FmhaProblem, tensor: Array, b: int, first: int, count: int) -> Array:
    """[rows, heads, elements]"""
    array = np.asarray(tensor)
    found: Array = array[first : first + count] if problem.varlen else array[b].swapaxes(0, 1)[:count]
    return found.astype(np.float64)


def _divisors(inputs: Mapping[str, Array], name: str, b: int) -> Array:
    """[heads, 1]: what new rows are divided by."""
    if f"{name}_descale" not in inputs:
        return np.ones((1, 1))
    factors = np.asarray(inputs[f"{name}_descale"]).astype(np.float64)
    own: Array = factors[b] if factors.ndim == 2 else factors
    return own.reshape(-1, 1)


def _tables(problem: FmhaProblem, inputs: Mapping[str, Array], places: Array) -> tuple[Array, Array]:
    """Cosines and sines [positions, pairs]; of positions beyond the tables those of no rotation."""
    if problem.rope is Rope.NONE:
        return np.ones((len(places), 0)), np.zeros((len(places), 0))
    cos, sin = (np.asarray(inputs[f"rotary_{name}"]).astype(np.float64) for name in ("cos", "sin"))
    known = (places < len(cos))[:, None]
    at = np.minimum(places, max(len(cos) - 1, 0))
    if not len(cos):
        return np.ones((len(places), cos.shape[1])), np.zeros((len(places), cos.shape[1]))
    return np.where(known, cos[at], 1.0), np.where(known, sin[at], 0.0)


def _store(
    problem: FmhaProblem, inputs: Mapping[str, Array], cache: Array, name: str, b: int, places: Array, rows: Array
) -> None:
    fits = places < problem.seq_k
    places, rows = places[fits], rows[fits]
    if problem.paging is None:
        item = int(np.asarray(inputs["cache_index"])[b]) if "cache_index" in inputs else b
        cache[item][:, places] = rows.swapaxes(0, 1)
        return
    last = int(places[-1]) + 1 if len(places) else 0
    pages = pages_of(problem, inputs, b, last)[places]
    there = pages >= 0
    pages, places, rows = pages[there], places[there], rows[there]
    row = places % problem.paging.page_size
    if problem.paging.layout is KvLayout.LINEAR:
        cache[pages, row] = rows
        return
    width = cache.shape[-1]
    if name == "k":  # [P, Hk, D/x, page, x]
        cache[pages, :, :, row] = rows.reshape(len(rows), cache.shape[1], cache.shape[2], width)
    else:  # [P, Hk, page/x, Dv, x]
        cache[pages, :, row // width, :, row % width] = rows

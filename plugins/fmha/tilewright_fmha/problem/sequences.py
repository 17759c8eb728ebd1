"""One sequence of a problem: how long it is, and where its rows lie in tensors. For references and samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import KvLayout, KvLookup, QScale

__all__ = ["Item", "gather", "item_of", "pages_of", "random_of", "scales_of"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Item:
    """Lengths are those that kernels go by: what is out of range is brought into it."""

    b: int
    q_first: int
    """First row of a sequence among others; 0 for items of one size."""
    queries: int
    k_first: int
    keys: int
    cache: int
    """Which item of k and v is its."""
    pages: Array
    """Page of each key, -1 of one that is absent; empty if there are no pages."""
    skipped: bool

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """[keys]"""
        there: npt.NDArray[np.bool_] = self.pages >= 0 if self.pages.size else np.ones(self.keys, bool)
        return there


def item_of(problem: FmhaProblem, inputs: Mapping[str, Array], b: int) -> Item:
    q_first, room = _span(inputs, "cu_seqlens_q", b, problem.seq_q, problem.total_q)
    queries = _length(inputs, "seqlens_q", b, room)
    if problem.paging is not None:
        k_first, room = 0, problem.seq_k
    else:
        k_first, room = _span(inputs, "cu_seqlens_k", b, problem.seq_k, problem.total_k)
    keys = _length(inputs, "seqlens_k", b, room)
    cache = int(inputs["cache_index"][b]) if "cache_index" in inputs else b
    pages = pages_of(problem, inputs, b, keys)
    return Item(b, q_first, queries, k_first, keys, cache, pages, queries < problem.min_q)


def _span(inputs: Mapping[str, Array], name: str, b: int, room: int, total: int) -> tuple[int, int]:
    if name not in inputs:
        return 0, room
    first, last = (min(max(int(end), 0), total) for end in np.asarray(inputs[name])[b : b + 2])
    return first, min(max(last - first, 0), room)


def _length(inputs: Mapping[str, Array], name: str, b: int, room: int) -> int:
    return min(max(int(np.asarray(inputs[name])[b]), 0), room) if name in inputs else room


def pages_of(problem: FmhaProblem, inputs: Mapping[str, Array], b: int, rows: int) -> Array:
    """The page of each of the first ``rows`` rows of sequence ``b``; -1: none, or one outside of the cache."""
    paging = problem.paging
    if paging is None:
        return np.zeros(0, np.int64)
    table = np.asarray(inputs["block_table"]).astype(np.int64)
    if paging.lookup is KvLookup.VLLM:
        own = table[b]
    else:
        first, last = (int(end) for end in np.asarray(inputs["page_starts"])[b : b + 2])
        own = table[max(first, 0) : max(last, 0)]
    place = np.arange(rows) // paging.page_size
    pages = np.where(place < len(own), own[np.minimum(place, max(len(own) - 1, 0))], -1) if len(own) else place * 0 - 1
    inside: Array = np.where((pages >= 0) & (pages < paging.pages), pages, -1)
    return inside


def gather(problem: FmhaProblem, inputs: Mapping[str, Array], name: str, item: Item, head: int) -> Array:
    """Rows [length, elements] of a head of ``q``, ``k``, ``v`` or what lies as these do, as they are stored."""
    array = np.asarray(inputs[problem.source(name)])
    keys = name in ("k", "v", "dk", "dv")
    first, length = (item.k_first, item.keys) if keys else (item.q_first, item.queries)
    found: Array
    if keys and problem.paging is not None:
        rows = np.arange(item.keys)
        pages, row = np.maximum(item.pages, 0), rows % problem.paging.page_size
        width = array.shape[-1]
        if problem.paging.layout is KvLayout.LINEAR:
            found = array[pages, row, head]
        elif name == "k":  # [P, Hk, D/x, page, x]
            found = array[pages, head, :, row, :].reshape(item.keys, array.shape[2] * width)
        else:  # [P, Hk, page/x, Dv, x]
            found = array[pages, head, row // width, :, row % width]
    elif problem.varlen:
        found = array[first : first + length, head]
    else:
        found = array[item.cache if keys else item.b, head, :length]
    return found[:, : problem.hdim_v] if problem.source(name) != name else found


def scales_of(problem: FmhaProblem, inputs: Mapping[str, Array], name: str, item: Item, head: int) -> Any:
    """The factor of an fp8 operand: one number, or one for each of the item's rows."""
    scaling = problem.scaling
    if scaling is None or f"{name}_descale" not in inputs:
        return 1.0
    factors = np.asarray(inputs[f"{name}_descale"]).astype(np.float64)
    if scaling.kind is QScale.KV_BLOCKSCALE and name != "q":
        return factors[np.maximum(item.pages, 0), head]
    if factors.ndim == 0:
        return float(factors)
    if scaling.kind is not QScale.BLOCKSCALE:
        return float(factors[head] if factors.ndim == 1 else factors[item.b, head])
    rows, block = (item.queries, scaling.block_q) if name == "q" else (item.keys, scaling.block_k)
    return factors[item.b, head, np.arange(rows) // block]


def random_of(problem: FmhaProblem, inputs: Mapping[str, Array]) -> tuple[int, int]:
    """Seed and offset of dropout."""
    if not problem.has("rng"):
        return problem.seed, problem.offset
    low, high, offset = (int(word) & 0xFFFFFFFF for word in np.asarray(inputs["rng"])[:3])
    return high << 32 | low, offset

"""The truth of attention, in NumPy float64: readable rather than fast, one item and head at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.problem.parse.prefix import PREFIX_OPERANDS
from tilewright_fmha.problem.philox import random_bytes
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.sequences import Item, gather, item_of, random_of, scales_of
from tilewright_fmha.vocabulary import Scores

__all__ = ["put_rows", "reference_attention", "score", "scores", "softmax_of", "weighted"]

Array = npt.NDArray[Any]


# ---- one head of one sequence, as plain arrays ----


def score(q: Array, k: Array, scale: float, softcap: float = 0.0, bias: Any = None, slope: float = 0.0,
          off: int = 0) -> Array:  # fmt: skip
    """[queries, keys]: ``softcap(scale * q k^T) + bias - slope * |i + off - j|``."""
    s: Array = scale * (np.asarray(q, np.float64) @ np.asarray(k, np.float64).T)
    if softcap > 0:
        s = softcap * np.tanh(s / softcap)
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    if slope:
        s = s - slope * np.abs(np.arange(s.shape[0])[:, None] + off - np.arange(s.shape[1])[None, :])
    return s


def softmax_of(s: Array, visible: Array, sink: float | None = None) -> tuple[Array, Array]:
    """Probabilities [queries, keys], and log-sum-exp [queries]. A row that sees nothing has zeros and -inf; a learned
    ``sink`` takes part in the sum alone.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        s = np.where(visible, s, -np.inf)
        most = s.max(axis=1, initial=-np.inf if sink is None else sink)
        most = np.where(most == -np.inf, 0.0, most)
        p = np.where(visible, np.exp(s - most[:, None]), 0.0)
        total = p.sum(axis=1) + (0.0 if sink is None else np.exp(sink - most))
        lse = np.where(total == 0, -np.inf, most + np.log(total))
        return np.where(total[:, None] == 0, 0.0, p / total[:, None]), lse


def weighted(p: Array, v: Array, visible: Array) -> Array:
    """``p v``, to which only what a row sees contributes: values that nobody may see can be anything, NaN included."""
    odd = np.asarray(~np.isfinite(v).all(axis=1))
    o: Array = p @ np.where(odd[:, None], 0.0, v)
    with np.errstate(invalid="ignore", over="ignore"):
        for row in np.flatnonzero((visible & odd).any(axis=1)):
            o[row] = p[row, visible[row]] @ v[visible[row]]
    return o


def _rows(array: Array, factor: Any) -> Array:
    wide = np.asarray(array).astype(np.float64)
    scale = np.asarray(factor, np.float64)
    return wide * (scale[:, None] if scale.ndim else scale)


# ---- whole problems ----


def scores(problem: FmhaProblem, inputs: Mapping[str, Array], b: int, h: int) -> tuple[Array, Array]:
    """Scores and visibility [queries, keys] of query head ``h`` of item ``b``, of its true lengths."""
    item = item_of(problem, inputs, b)
    head = h // problem.group
    with np.errstate(invalid="ignore", over="ignore"):
        q = _rows(gather(problem, inputs, "q", item, h), scales_of(problem, inputs, "q", item, h))
        k = _rows(gather(problem, inputs, "k", item, head), scales_of(problem, inputs, "k", item, head))
        off = problem.mask.offset(item.queries, item.keys)
        s = score(q, k, problem.scale, problem.softcap, _bias(inputs, item, h), _slope(inputs, item, h), off)
    return s, problem.mask.visible(item.queries, item.keys) & item.present


def _bias(inputs: Mapping[str, Array], item: Item, h: int) -> Array | None:
    if "bias" not in inputs:
        return None
    bias = np.asarray(inputs["bias"])
    own = bias[0 if bias.shape[0] == 1 else item.b, 0 if bias.shape[1] == 1 else h].astype(np.float64)
    rows = item.queries if own.shape[0] > 1 else 1
    columns = item.keys if own.shape[1] > 1 else 1
    seen: Array = own[:rows, :columns]
    return seen


def _slope(inputs: Mapping[str, Array], item: Item, h: int) -> float:
    if "alibi_slopes" not in inputs:
        return 0.0
    slopes = np.asarray(inputs["alibi_slopes"]).astype(np.float64)
    return float(slopes[item.b, h] if slopes.ndim == 2 else slopes[h])


def reference_attention(
    problem: FmhaProblem, inputs: Mapping[str, Array], only: Collection[tuple[int, int]] = ()
) -> dict[str, Array]:
    """The outputs by name, unrounded float64. What no sequence covers is left zero (``lse``: -inf), and so is, if some
    items and heads of queries are named, what belongs to others.
    """
    if problem.shared is not None:
        return _merged(problem, inputs, only)
    out = {item.name: np.zeros(item.desc.shape) for item in problem.operands if item.role.value == "output"}
    if "randval" in out:
        out["randval"] = out["randval"].astype(np.int64)
    if "status" in out:
        out["status"] = out["status"].astype(np.int64)
    if "lse" in out:
        out["lse"].fill(-np.inf)
    if problem.scores is Scores.MASKED:
        out["scores"].fill(-np.inf)
    seed, offset = random_of(problem, inputs)
    for b in range(problem.batch):
        item = item_of(problem, inputs, b)
        if item.skipped:
            continue
        for h in range(problem.heads_q):
            if not only or (b, h) in only:
                _one(problem, inputs, item, h, out, (seed, offset))
    return out


def _merged(problem: FmhaProblem, inputs: Mapping[str, Array], only: Collection[tuple[int, int]]) -> dict[str, Array]:
    """Attention over prefixes and over the rest, weighed by the sums of each: exp(a) / (exp(a) + exp(b))."""
    shared = problem.shared
    assert shared is not None
    rest = reference_attention(shared.rest, inputs, only)
    # Its items are groups: all of them are needed, whichever sequences are asked for.
    prefix = reference_attention(shared.prefix, _of_prefix(problem, shared.prefix, inputs))
    b, heads, rows = problem.batch, problem.heads_q, problem.seq_q
    o, lse = prefix["o"], prefix["lse"]
    if not shared.prefix.varlen:
        o, lse = o.swapaxes(1, 2).reshape(-1, heads, problem.hdim_v), lse.swapaxes(0, 1).reshape(heads, -1)
    if not problem.varlen:
        o = o.reshape(b, rows, heads, -1).swapaxes(1, 2)
        lse = lse.reshape(heads, b, rows).swapaxes(0, 1)
    live = _live(problem, inputs, rest["lse"].shape, only)
    lse = np.where(live, lse, -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        most = np.maximum(lse, rest["lse"])
        own, its = (np.where(most == -np.inf, 0.0, np.exp(item - most)) for item in (rest["lse"], lse))
        total = own + its
        axis = (1, 0) if problem.varlen else (0, 1, 2)
        weights = [np.where(total == 0, 0.0, item / total).transpose(axis)[..., None] for item in (own, its)]
        found = {"o": weights[0] * rest["o"] + weights[1] * o}
        if "lse" in {item.name for item in problem.operands}:
            found["lse"] = np.where(total == 0, -np.inf, most + np.log(total))
    if "status" in rest:
        found["status"] = rest["status"]
    return found


def _of_prefix(problem: FmhaProblem, prefix: FmhaProblem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Inputs of the part over prefixes, whose items are groups."""
    found = {own: inputs[name] for name, own in PREFIX_OPERANDS.items() if name in inputs}
    found |= {name: inputs[name] for name in ("k", "v", "q_descale", "k_descale", "v_descale") if name in inputs}
    q = np.asarray(inputs["q"])
    rows = q if problem.varlen else q.swapaxes(1, 2).reshape(problem.total_q, problem.heads_q, problem.hdim_q)
    if not prefix.varlen:
        rows = rows.reshape(prefix.batch, prefix.seq_q, problem.heads_q, problem.hdim_q).swapaxes(1, 2)
    return {**found, "q": rows}


def _live(
    problem: FmhaProblem, inputs: Mapping[str, Array], shape: tuple[int, ...], only: Collection[tuple[int, int]]
) -> Array:
    """True where a head of a row of queries, as ``lse`` has them, is computed."""
    live = np.zeros(shape, bool)
    for b in range(problem.batch):
        item = item_of(problem, inputs, b)
        for h in range(problem.heads_q):
            if not item.skipped and (not only or (b, h) in only):
                put_rows(problem, live, item, h, np.ones(item.queries, bool), "hr")
    return live


def _one(
    problem: FmhaProblem,
    inputs: Mapping[str, Array],
    item: Item,
    h: int,
    out: dict[str, Array],
    random: tuple[int, int],
) -> None:
    head = h // problem.group
    s, visible = scores(problem, inputs, item.b, h)
    sink = float(np.asarray(inputs["sinks"])[h]) if "sinks" in inputs else None
    p, lse = softmax_of(s, visible, sink)
    v = _rows(gather(problem, inputs, "v", item, head), scales_of(problem, inputs, "v", item, head))
    if "scores" in out:
        put_rows(problem, out["scores"], item, h, _asked(problem, inputs, item, h, s, p, visible), "hrc")
    if problem.dropout:
        drawn = random_bytes(*random, item.b * problem.heads_q + h, item.queries, item.keys)
        p = np.where(drawn >= problem.dropout, p * problem.keep_scale, 0.0)
        if "randval" in out:
            put_rows(problem, out["randval"], item, h, drawn.view(np.int8), "hrc")
    o = weighted(p, v, visible)
    put_rows(problem, out["o"], item, h, o)
    if "lse" in out:
        put_rows(problem, out["lse"], item, h, lse, "hr")


def _asked(
    problem: FmhaProblem, inputs: Mapping[str, Array], item: Item, h: int, s: Array, p: Array, visible: Array
) -> Array:
    """The stage of the scores that is an output, of an item's true lengths."""
    if problem.scores is Scores.PROBABILITIES:
        return p
    if problem.scores is Scores.MASKED:
        return np.where(visible, s, -np.inf)
    q, k = gather(problem, inputs, "q", item, h), gather(problem, inputs, "k", item, h // problem.group)
    return score(q, k, problem.scale, problem.softcap if problem.scores is Scores.CAPPED else 0.0)


def put_rows(
    problem: FmhaProblem,
    tensor: Array,
    item: Item,
    head: int,
    rows: Array,
    axes: str = "rh",
    keys: bool = False,
    add: bool = False,
) -> None:
    """Store what one head of an item gives. ``axes``: how a tensor of sequences end to end begins: with rows or heads;
    ``hrc`` is one that has a column for each key.
    """
    first = item.k_first if keys else item.q_first
    if not problem.varlen:
        own = tensor[item.b, head, : len(rows)]
    elif axes == "rh":
        own = tensor[first : first + len(rows), head]
    else:
        own = tensor[head, first : first + len(rows)]
    if axes == "hrc":
        own = own[:, : rows.shape[1]]
    own[...] = own + rows if add else rows

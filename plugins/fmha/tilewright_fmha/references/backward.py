"""The truth of the gradients of attention, in NumPy float64: one item and head at a time, from what forward stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.problem.philox import random_bytes
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.sequences import Item, gather, item_of, random_of
from tilewright_fmha.references.forward import put_rows, score, scores, weighted
from tilewright_kit.contract.problem import Role

__all__ = ["reference_backward"]

Array = npt.NDArray[Any]


def reference_backward(
    problem: FmhaProblem, inputs: Mapping[str, Array], only: Collection[tuple[int, int]] = ()
) -> dict[str, Array]:
    """The gradients by name, unrounded float64. Rows that no sequence covers are left zero, and so are, if some items
    and heads of queries are named, those of others.
    """
    out = {item.name: np.zeros(item.desc.shape) for item in problem.operands if item.role is Role.OUTPUT}
    if "randval" in out:
        out["randval"] = out["randval"].astype(np.int64)
    random = random_of(problem, inputs)
    for b in range(problem.batch):
        item = item_of(problem, inputs, b)
        for h in range(problem.heads_q):
            if not only or (b, h) in only:
                _one(problem, inputs, item, h, out, random)
    return out


def _one(
    problem: FmhaProblem,
    inputs: Mapping[str, Array],
    item: Item,
    h: int,
    out: dict[str, Array],
    random: tuple[int, int],
) -> None:
    head = h // problem.group
    names = (("q", h), ("k", head), ("v", head), ("o", h), ("do", h))
    q, k, v, o, do = (gather(problem, inputs, name, item, own).astype(np.float64) for name, own in names)
    lse = _saved(problem, inputs, item, h)
    s, visible = scores(problem, inputs, item.b, h)
    seen = visible & (lse > -np.inf)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        p = np.where(seen, np.exp(np.where(seen, s, 0.0) - np.where(np.isneginf(lse), 0.0, lse)[:, None]), 0.0)
        delta = (do * o).sum(axis=1)
        kept: Any = 1.0
        if problem.dropout:
            drawn = random_bytes(*random, item.b * problem.heads_q + h, item.queries, item.keys)
            kept = np.where(drawn >= problem.dropout, problem.keep_scale, 0.0)
            if "randval" in out:
                put_rows(problem, out["randval"], item, h, drawn.view(np.int8), "hrc")
        dp = np.where(seen, do @ v.T, 0.0) * kept
        ds = np.where(seen, p * (dp - delta[:, None]), 0.0)
        if "dbias" in out:
            _add_bias(out["dbias"], ds, item, h)
        if "dsinks" in out:
            sink = float(np.asarray(inputs["sinks"])[h])
            known = lse > -np.inf
            out["dsinks"][h] -= (np.exp(sink - lse[known]) * delta[known]).sum()
        if problem.softcap:
            capped = score(q, k, problem.scale, problem.softcap)
            ds = np.where(seen, ds * (1 - (capped / problem.softcap) ** 2), 0.0)
    put_rows(problem, out["dq"], item, h, problem.scale * weighted(ds, k, seen))
    put_rows(problem, out["dk"], item, head, problem.scale * weighted(ds.T, q, seen.T), keys=True, add=True)
    put_rows(problem, out["dv"], item, head, weighted((p * kept).T, do, seen.T), keys=True, add=True)


def _saved(problem: FmhaProblem, inputs: Mapping[str, Array], item: Item, h: int) -> Array:
    lse = np.asarray(inputs["lse"]).astype(np.float64)
    own: Array = lse[h, item.q_first :] if problem.varlen else lse[item.b, h]
    return own[: item.queries]


def _add_bias(dbias: Array, ds: Array, item: Item, h: int) -> None:
    """Sums along the axes that the bias broadcasts."""
    own = dbias[0 if dbias.shape[0] == 1 else item.b, 0 if dbias.shape[1] == 1 else h]
    if own.shape[1] == 1:
        ds = ds.sum(axis=1, keepdims=True)
    if own.shape[0] == 1:
        ds = ds.sum(axis=0, keepdims=True)
    own[: ds.shape[0], : ds.shape[1]] += ds

"""Problems of attention out of named features, and lists of them in which every two features meet somewhere."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright_fmha.words import ATTENTION, ATTENTION_BACKWARD
from tilewright_kit.problem import OperationRequest
from tilewright_kit.tensor import TensorDesc

__all__ = ["COMPILED", "SIZED", "Case", "drawn_cases", "pairwise", "request_of"]

COMPILED: Mapping[str, Sequence[Any]] = {
    "dtype": ["fp32", "bf16", "fp16"],
    "mode": ["batch", "varlen", "lengths"],
    "mask": ["no", "causal", "window"],
    "bias": ["no", "full", "alibi"],
    "drop": [False, True],
    "softcap": [False, True],
    "sinks": [False, True],
}
"""What kernels differ in."""
SIZED: Mapping[str, Sequence[Any]] = {
    "heads": [(2, 2), (4, 1), (6, 2)],
    "hdim": [(32, 32), (24, 32), (32, 8)],
    "seq": [(17, 65), (1, 1), (3, 200), (64, 17), (127, 65)],
    "layout": ["bhsd", "bshd"],
}
"""What they are told at run time (but that heads are padded)."""

MASKS: Mapping[str, Mapping[str, Any]] = {
    "no": {},
    "causal": {"causal": True},
    "bottom": {"mask": "bottom_right"},
    "window": {"window_left": 20, "window_right": 3, "mask_align": "bottom_right"},
    "sink": {"window_left": 5, "window_right": 0, "sink_size": 3},
}
BIASES = {
    "no": None,
    "full": "bhrc",
    "keys": "b__c",
    "head": "_hrc",
    "rows": "bhr_",
    "column": "_h_c",
    "alibi": None,
}
"""Axes that a bias has of its own; it broadcasts along the others."""


@dataclass(frozen=True)
class Case:
    """One value of every feature."""

    dtype: str = "fp32"
    mode: str = "batch"
    """``batch``, ``lengths`` (of items of one room) or ``varlen``."""
    mask: str = "no"
    bias: str = "no"
    dbias: bool = False
    drop: bool = False
    softcap: bool = False
    sinks: bool = False
    heads: tuple[int, int] = (2, 2)
    hdim: tuple[int, int] = (32, 32)
    seq: tuple[int, int] = (17, 65)
    layout: str = "bhsd"
    columns: bool = False
    """Values lie column by column."""

    @property
    def legal(self) -> bool:
        """False if a rule or the parser refuses it."""
        return not self.dbias or self.bias not in ("no", "alibi")


def pairwise(axes: Mapping[str, Sequence[Any]], seed: int, legal: Callable[[Case], bool] | None = None) -> list[Case]:
    """Cases that hold every legal pair of values of two axes, greedily chosen."""
    names = list(axes)
    rng = np.random.default_rng(seed)
    allowed = legal or (lambda case: case.legal)
    left = set()
    for one, other in itertools.combinations(names, 2):
        for x, y in itertools.product(range(len(axes[one])), range(len(axes[other]))):
            if _legal_with(axes, {one: x, other: y}, allowed):
                left.add((one, x, other, y))
    cases = []
    while left:
        best, gain = None, -1
        start = sorted(left)[int(rng.integers(len(left)))]
        for _ in range(40):
            chosen = {name: int(rng.integers(len(axes[name]))) for name in names}
            chosen |= {start[0]: start[1], start[2]: start[3]}
            if not allowed(_case(axes, chosen)):
                continue
            found = len(left & set(_pairs(chosen, names)))
            if found > gain:
                best, gain = chosen, found
        if best is not None:
            left -= set(_pairs(best, names))
            cases.append(_case(axes, best))
    return cases


def _pairs(chosen: Mapping[str, int], names: Sequence[str]) -> Iterator[tuple[str, int, str, int]]:
    for one, other in itertools.combinations(names, 2):
        yield one, chosen[one], other, chosen[other]


def _case(axes: Mapping[str, Sequence[Any]], chosen: Mapping[str, int]) -> Case:
    return Case(**{name: axes[name][index] for name, index in chosen.items()})


def _legal_with(axes: Mapping[str, Sequence[Any]], fixed: Mapping[str, int], legal: Callable[[Case], bool]) -> bool:
    """Some case has these values and is legal: that of the first values, or of the last ones, of all other axes."""
    ends = (dict.fromkeys(axes, 0), {name: len(axes[name]) - 1 for name in axes})
    return any(legal(_case(axes, {**end, **fixed})) for end in ends)


def request_of(case: Case, operation: str = ATTENTION, batch: int = 3, **more: Any) -> OperationRequest:
    """``more`` are further attributes."""
    hq, hk = case.heads
    (sq, sk), (d, dv) = case.seq, case.hdim
    varlen = case.mode == "varlen"

    def tensor(rows: int, heads: int, size: int, columns: bool = False) -> TensorDesc:
        shape = (rows * 2 + 3, heads, size) if varlen else (batch, heads, rows, size)
        order = (1, 0, 2) if varlen and case.layout == "bhsd" else (0, 1, 2) if varlen else (0, 1, 2, 3)
        if not varlen and case.layout == "bshd":
            order = (0, 2, 1, 3)
        if columns:
            order = (*(axis for axis in order if axis != (0 if varlen else 2)), 0 if varlen else 2)
        return TensorDesc.of(case.dtype, shape, _strides(shape, order))

    tensors = {"q": tensor(sq, hq, d), "k": tensor(sk, hk, d), "v": tensor(sk, hk, dv, case.columns)}
    attributes: dict[str, Any] = {**MASKS[case.mask], **more}
    if varlen:
        tensors |= {name: TensorDesc.of("int32", (batch + 1,)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        attributes |= {"max_seqlen_q": sq, "max_seqlen_k": sk}
    elif case.mode == "lengths":
        tensors |= {name: TensorDesc.of("int32", (batch,)) for name in ("seqlens_q", "seqlens_k")}
    axes = BIASES[case.bias]
    if axes is not None:
        sizes = zip((1 if varlen else batch, hq, sq, sk), axes, strict=True)
        kind = case.dtype if case.softcap else "fp32"
        tensors["bias"] = TensorDesc.of(kind, tuple(1 if axis == "_" else size for size, axis in sizes))
    if case.bias == "alibi":
        tensors["alibi_slopes"] = TensorDesc.of("fp32", (hq,))
    if case.sinks:
        tensors["sinks"] = TensorDesc.of("fp32", (hq,))
    if case.drop:
        attributes |= {"dropout_p": 0.3}
        tensors["rng"] = TensorDesc.of("int32", (4,))
    if case.softcap:
        attributes["softcap"] = 2.0
    if operation == ATTENTION_BACKWARD:
        o = tensor(sq, hq, dv)
        lse = (hq, o.shape[0]) if varlen else (batch, hq, sq)
        tensors |= {"o": o, "do": o, "lse": TensorDesc.of("fp32", lse)}
        if case.dbias:
            attributes["return_dbias"] = True
    return OperationRequest(operation, tensors, {}, attributes)


def _strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def drawn_cases(axes: Mapping[str, Sequence[Any]], seed: int) -> list[Case]:
    """Pairs of what kernels differ in, each case with other sizes."""
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(case, **{name: values[int(rng.integers(len(values)))] for name, values in SIZED.items()})
        for case in pairwise(axes, 4)
    ]

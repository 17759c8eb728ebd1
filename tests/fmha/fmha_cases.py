"""Problems of attention out of named features, and lists of them in which every two features meet somewhere."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["CACHES", "COMPILED", "SIZED", "CacheCase", "Case", "cache_request", "drawn_cases", "pairwise", "request_of"]

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

CACHES: Mapping[str, Sequence[Any]] = {
    "dtype": ["fp8", "fp32", "bf16fp8", "bf16"],
    "lookup": ["vllm", "sglang"],
    "layout": ["linear", "vectorized"],
    "page": [16, 1],
    "varlen": [False, True],
    "mask": ["no", "bottom", "sink"],
    "bias": ["no", "keys", "alibi"],
    "drop": [False, True],
    "softcap": [False, True],
    "sinks": [False, True],
    "splits": [0, 3],
    "scales": ["no", "heads", "pages", "blocks"],
}
"""What kernels over caches in pages differ in."""

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


@dataclass(frozen=True)
class CacheCase:
    """One value of every feature of attention over a cache in pages: 3 sequences of up to 5 queries and 96 keys."""

    dtype: str = "fp32"
    """Of queries, and of the cache where that is another."""
    lookup: str = "vllm"
    layout: str = "linear"
    page: int = 16
    varlen: bool = False
    mask: str = "no"
    bias: str = "no"
    drop: bool = False
    softcap: bool = False
    sinks: bool = False
    splits: int = 0
    scales: str = "no"

    @property
    def legal(self) -> bool:
        """False if the parser refuses it: chunks are of sixteen bytes, factors of 8 bits."""
        own = {"blocks": ("fp8",), "heads": ("fp8", "bf16fp8"), "pages": ("fp8", "bf16fp8")}
        return (self.layout == "linear" or self.page >= 16) and self.dtype in own.get(self.scales, (self.dtype,))


AnyCase = TypeVar("AnyCase", Case, CacheCase)


def pairwise(
    axes: Mapping[str, Sequence[Any]],
    seed: int,
    legal: Callable[[AnyCase], bool] | None = None,
    kind: type[AnyCase] = Case,  # type: ignore[assignment]
) -> list[AnyCase]:
    """Cases that hold every legal pair of values of two axes, greedily chosen."""
    names = list(axes)
    rng = np.random.default_rng(seed)

    def case_of(chosen: Mapping[str, int]) -> AnyCase:
        return kind(**{name: axes[name][index] for name, index in chosen.items()})

    def allowed(case: AnyCase) -> bool:
        return case.legal if legal is None else legal(case)

    left = set()
    for one, other in itertools.combinations(names, 2):
        for x, y in itertools.product(range(len(axes[one])), range(len(axes[other]))):
            if any(allowed(case_of({**end, one: x, other: y})) for end in _ends(axes)):
                left.add((one, x, other, y))
    cases = []
    while left:
        best, gain = None, -1
        start = sorted(left)[int(rng.integers(len(left)))]
        for _ in range(40):
            chosen = {name: int(rng.integers(len(axes[name]))) for name in names}
            chosen |= {start[0]: start[1], start[2]: start[3]}
            if not allowed(case_of(chosen)):
                continue
            found = len(left & set(_pairs(chosen, names)))
            if found > gain:
                best, gain = chosen, found
        if best is not None:
            left -= set(_pairs(best, names))
            cases.append(case_of(best))
    return cases


def _pairs(chosen: Mapping[str, int], names: Sequence[str]) -> Iterator[tuple[str, int, str, int]]:
    for one, other in itertools.combinations(names, 2):
        yield one, chosen[one], other, chosen[other]


def _ends(axes: Mapping[str, Sequence[Any]]) -> tuple[dict[str, int], ...]:
    """A pair counts as legal if some case has it and the first values, or the last ones, of all other axes."""
    return dict.fromkeys(axes, 0), {name: len(axes[name]) - 1 for name in axes}


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


def cache_request(case: CacheCase) -> OperationRequest:
    batch, rows, keys, (hq, hk), (d, dv) = 3, 5, 96, (4, 2), (48, 40)
    q, kv = ("bf16", "fp8") if case.dtype == "bf16fp8" else (case.dtype, case.dtype)
    each = keys // case.page
    pages, width = batch * each + 2, 16 // TensorDesc.of(kv, ()).dtype.bytes
    shapes: dict[str, tuple[int, ...]] = {"k": (pages, case.page, hk, d), "v": (pages, case.page, hk, dv)}
    attributes: dict[str, Any] = {**MASKS[case.mask], "return_lse": True}
    if case.layout == "vectorized":
        shapes = {"k": (pages, hk, d // width, case.page, width), "v": (pages, hk, case.page // width, dv, width)}
        attributes["kv_layout"] = case.layout
    tensors = {name: TensorDesc.of(kv, shape) for name, shape in shapes.items()}
    ints: dict[str, tuple[int, ...]] = {"seqlens_k": (batch,), "block_table": (batch, each)}
    if case.lookup == "sglang":
        ints |= {"block_table": (batch * each,), "page_starts": (batch + 1,)}
        attributes["max_seqlen_k"] = keys
    tensors["q"] = TensorDesc.of(q, (rows * batch, hq, d) if case.varlen else (batch, hq, rows, d))
    if case.varlen:
        ints["cu_seqlens_q"], attributes["max_seqlen_q"] = (batch + 1,), rows
    if case.drop:
        ints["rng"], attributes["dropout_p"] = (4,), 0.3
    factors: dict[str, tuple[int, ...]] = {}
    if axes := BIASES[case.bias]:
        sizes = zip((1 if case.varlen else batch, hq, rows, keys), axes, strict=True)
        factors["bias"] = tuple(1 if axis == "_" else size for size, axis in sizes)
    factors |= {"alibi_slopes": (batch, hq)} if case.bias == "alibi" else {}
    factors |= {"sinks": (hq,)} if case.sinks else {}
    factors |= {f"{name}_descale": shape for name, shape in _factors(case, batch, pages, (hq, hk)).items()}
    tensors |= {name: TensorDesc.of("int32", shape) for name, shape in ints.items()}
    tensors |= {name: TensorDesc.of("fp32", shape) for name, shape in factors.items()}
    attributes |= {"softcap": 2.0} if case.softcap else {}
    attributes |= {"num_splits": case.splits} if case.splits else {}
    attributes |= {"scale_block_q": 4, "scale_block_k": 24} if case.scales == "blocks" else {}
    return OperationRequest(ATTENTION, tensors, {}, attributes)


def _factors(case: CacheCase, batch: int, pages: int, heads: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of the factors of q (where it has 8 bits), k and v."""
    lead: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "no": ((), ()), "heads": ((batch, heads[0]), (batch, heads[1])), "pages": ((), (pages, heads[1])),
        "blocks": ((batch, heads[0], 2), (batch, heads[1], 4)),
    }  # fmt: skip
    if case.scales == "no":
        return {}
    q, kv = lead[case.scales]
    return {**({"q": q} if case.dtype == "fp8" else {}), "k": kv, "v": kv}

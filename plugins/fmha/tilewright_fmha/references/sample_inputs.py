"""Content for the operands of a request that must mean something: lengths, pages, slopes, angles, what forward gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.problem.parse.attention import parse_append, parse_attention, parse_backward
from tilewright_fmha.problem.parse.prefix import PREFIX_OPERANDS
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.sequences import random_of
from tilewright_fmha.references.forward import reference_attention
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND, KvLookup
from tilewright_kit.contract.problem import OperationRequest

__all__ = ["PARSERS", "sample_inputs", "structure"]

Array = npt.NDArray[Any]
PARSERS = {ATTENTION: parse_attention, ATTENTION_BACKWARD: parse_backward, KV_APPEND: parse_append}
_TENSORS = ("q", "k", "v", "do", "bias", "sinks")


def sample_inputs(request: OperationRequest, rng: np.random.Generator) -> dict[str, Array]:
    """Every input whose content is not free, and of gradients all that forward had: ``o`` and ``lse`` belong to it."""
    problem = PARSERS[request.operation](request)
    found = structure(problem, request, rng)
    if problem.operation == ATTENTION_BACKWARD:
        _forward(request, problem, found, rng)
    return found


def structure(
    problem: FmhaProblem, request: OperationRequest, rng: np.random.Generator, *, full: bool = False
) -> dict[str, Array]:
    """Lengths, pages, slopes, factors and angles. With ``full`` every sequence is as long as there is room."""
    found: dict[str, Array] = {}
    names = {operand.name for operand in problem.operands}
    if problem.varlen:
        found["cu_seqlens_q"] = _starts(rng, problem.batch, problem.total_q, problem.new_rows or problem.seq_q, full)
        if "cu_seqlens_k" in names:
            found["cu_seqlens_k"] = _starts(rng, problem.batch, problem.total_k, problem.seq_k, full)
    if problem.shared is not None:
        prefix = structure(problem.shared.prefix, request, rng, full=full)
        found |= {name: prefix[own] for name, own in PREFIX_OPERANDS.items() if name in names}
    _lengths(problem, names, found, rng, full)
    if problem.paging is not None:
        _pages(problem, found, rng)
    if "cache_index" in names:
        found["cache_index"] = rng.permutation(problem.cache_items)[: problem.batch].astype(np.int32)
    if "alibi_slopes" in names:
        shape = request.inputs["alibi_slopes"].shape
        found["alibi_slopes"] = (2.0 ** -rng.uniform(1, 6, shape)).astype(np.float32)
    if "rng" in names:
        found["rng"] = rng.integers(-(2**31), 2**31, 4, np.int64).astype(np.int32)
    for name in ("q_descale", "k_descale", "v_descale"):
        if name in names:
            found[name] = rng.uniform(0.5, 1.5, request.inputs[name].shape).astype(np.float32)
    if "rotary_cos" in names:
        desc = request.inputs["rotary_cos"]
        angles = np.arange(desc.shape[0])[:, None] * 100.0 ** (-np.arange(desc.shape[1]) / desc.shape[1])
        found["rotary_cos"] = np.cos(angles).astype(np.float32).astype(desc.dtype.numpy)
        found["rotary_sin"] = np.sin(angles).astype(np.float32).astype(desc.dtype.numpy)
    return found


def _starts(rng: np.random.Generator, count: int, total: int, most: int, full: bool) -> Array:
    """Starts of ``count`` sequences of at most ``most`` rows: the first full, the second empty, the last the rest; or
    all of them ``full``.
    """
    lengths = np.zeros(count, np.int64)
    left = total
    for index in range(count):
        if index == 1 and count > 2 and not full:
            continue
        whole = full or index in (0, count - 1)
        lengths[index] = min(left, most if whole else int(rng.integers(1, most + 1)))
        left -= int(lengths[index])
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _lengths(
    problem: FmhaProblem, names: set[str], found: dict[str, Array], rng: np.random.Generator, full: bool
) -> None:
    for name in ("seqlens_q", "seqlens_k"):
        if name not in names:
            continue
        starts = found.get(f"cu_{name}")
        room = np.full(problem.batch, problem.seq_q if name == "seqlens_q" else problem.seq_k)
        if starts is not None:
            room = np.diff(starts)
        if name == "seqlens_k" and problem.has("page_starts") and problem.paging is not None:
            # The table has room for all of them together.
            entries = problem.operand("block_table").desc.shape[0] // max(problem.batch, 1)
            room = np.minimum(room, entries * problem.paging.page_size)
        if problem.operation == KV_APPEND:
            room = room - problem.new_rows
        lengths = np.maximum(room, 0).astype(np.int32)
        if not full:
            lengths = np.array([rng.integers(0, most + 1) for most in lengths], np.int32)
        if lengths.size:
            lengths[0] = max(int(room[0]), 0)
        found[name] = lengths


def _pages(problem: FmhaProblem, found: dict[str, Array], rng: np.random.Generator) -> None:
    """Pages of their own for every sequence as far as there are enough; entries not in use point nowhere."""
    paging = problem.paging
    assert paging is not None
    lengths = found["seqlens_k"] + (problem.new_rows if problem.operation == KV_APPEND else 0)
    needed = -(-lengths // paging.page_size)
    order = rng.permutation(paging.pages)
    pages = np.resize(order, int(needed.sum())) if needed.sum() else np.zeros(0, np.int64)
    shape = problem.operand("block_table").desc.shape
    table = np.full(shape, -1, np.int32)
    first = np.concatenate([[0], np.cumsum(needed)]).astype(np.int32)
    if paging.lookup is KvLookup.SGLANG:
        table[: len(pages)] = pages[: shape[0]]
        found["page_starts"] = first
    else:
        for b in range(problem.batch):
            table[b, : needed[b]] = pages[first[b] : first[b + 1]]
    found["block_table"] = table


def _forward(
    request: OperationRequest, problem: FmhaProblem, found: dict[str, Array], rng: np.random.Generator
) -> None:
    """Operands of the forward pass, and what it gives."""
    for name in _TENSORS:
        if name in request.inputs:
            desc = request.inputs[name]
            found[name] = rng.standard_normal(desc.shape).astype(np.float32).astype(desc.dtype.numpy)
    saved = {"o", "lse", "do"}
    inputs = {name: desc for name, desc in request.inputs.items() if name not in saved}
    dropped = ("return_dbias", "deterministic", "return_randval")
    attributes = {name: value for name, value in request.attributes.items() if name not in dropped}
    forward = parse_attention(OperationRequest(ATTENTION, inputs, {}, {**attributes, "return_lse": True}))
    given: Mapping[str, Array] = found
    truth = reference_attention(forward, given)
    assert random_of(problem, found) == random_of(forward, found)
    found["o"] = truth["o"].astype(np.float32).astype(request.inputs["o"].dtype.numpy)
    found["lse"] = truth["lse"].astype(np.float32)

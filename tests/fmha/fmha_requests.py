"""Requests for attention, small ones, whose parts a test may replace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.references.append import reference_append
from tilewright_fmha.references.backward import reference_backward
from tilewright_fmha.references.forward import reference_attention
from tilewright_fmha.references.sample_inputs import PARSERS, sample_inputs
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

Array = npt.NDArray[Any]
Descs = dict[str, TensorDesc]
REFERENCES = {ATTENTION: reference_attention, ATTENTION_BACKWARD: reference_backward, KV_APPEND: reference_append}


def desc(dtype: str, *shape: int, strides: tuple[int, ...] | None = None) -> TensorDesc:
    return TensorDesc.of(dtype, shape, strides)


def ints(*shape: int) -> TensorDesc:
    return TensorDesc.of("int32", shape)


def batch_of(dtype: str = "fp16") -> Descs:
    """Two items of 5 queries in 4 heads and 7 keys in 2, of 16 elements; values of 24."""
    return {"q": desc(dtype, 2, 4, 5, 16), "k": desc(dtype, 2, 2, 7, 16), "v": desc(dtype, 2, 2, 7, 24)}


def varlen_of(dtype: str = "fp16") -> Descs:
    """Three sequences of at most 8 queries and 12 keys."""
    tensors = {"q": desc(dtype, 20, 4, 16), "k": desc(dtype, 30, 2, 16), "v": desc(dtype, 30, 2, 24)}
    return {**tensors, "cu_seqlens_q": ints(4), "cu_seqlens_k": ints(4)}


VARLEN: dict[str, Any] = {"max_seqlen_q": 8, "max_seqlen_k": 12}


def paged_of(dtype: str = "fp16") -> Descs:
    """Three sequences of one query; ten pages of 8 tokens, at most four a sequence."""
    tensors = {"q": desc(dtype, 3, 4, 1, 16), "k": desc(dtype, 10, 8, 2, 16), "v": desc(dtype, 10, 8, 2, 24)}
    return {**tensors, "block_table": ints(3, 4), "seqlens_k": ints(3)}


def prefill_of(dtype: str = "fp16") -> Descs:
    """The pages of ``paged_of``, and queries of different numbers."""
    return {**paged_of(dtype), "q": desc(dtype, 9, 4, 16), "cu_seqlens_q": ints(4)}


def vectorized_of(dtype: str = "fp16") -> Descs:
    """As ``paged_of``, chunks of sixteen bytes together."""
    width = 16 // TensorDesc.of(dtype, ()).dtype.bytes
    k, v = desc(dtype, 10, 2, 16 // width, 8, width), desc(dtype, 10, 2, 8 // width, 24, width)
    return {**paged_of(dtype), "k": k, "v": v}


def backward_of(dtype: str = "fp16") -> Descs:
    tensors = batch_of(dtype)
    return {**tensors, "o": desc(dtype, 2, 4, 5, 24), "do": desc(dtype, 2, 4, 5, 24), "lse": desc("fp32", 2, 4, 5)}


def append_of(dtype: str = "fp16") -> Descs:
    """Three new rows for each of two items, which have room for 20."""
    tensors = {"k_new": desc(dtype, 2, 2, 3, 16), "v_new": desc(dtype, 2, 2, 3, 24)}
    tensors |= {"k_past": desc(dtype, 2, 2, 20, 16), "v_past": desc(dtype, 2, 2, 20, 24)}
    return {**tensors, "seqlens_k": ints(2)}


def append_paged_of(dtype: str = "fp16") -> Descs:
    """Three new rows for each of three sequences of at most four of ten pages of 8 tokens."""
    tensors = {"k_new": desc(dtype, 3, 2, 3, 16), "v_new": desc(dtype, 3, 2, 3, 24)}
    tensors |= {"k_past": desc(dtype, 10, 8, 2, 16), "v_past": desc(dtype, 10, 8, 2, 24)}
    return {**tensors, "seqlens_k": ints(3), "block_table": ints(3, 4)}


def append_rounded_of(dtype: str = "bf16", paged: bool = True, **factors: tuple[int, ...]) -> Descs:
    """New rows of 16 bits for a cache of fp8, and shapes of the factors that they are divided by."""
    tensors = append_paged_of("fp8") if paged else append_of("fp8")
    tensors |= {name: desc(dtype, *tensors[name].shape) for name in ("k_new", "v_new")}
    return {**tensors, **{f"{name}_descale": desc("fp32", *shape) for name, shape in factors.items()}}


ROTARY: Descs = {"rotary_cos": desc("fp32", 32, 4), "rotary_sin": desc("fp32", 32, 4)}


def parsed(
    operation: str, tensors: Mapping[str, TensorDesc], outputs: Mapping[str, TensorDesc] | None = None, **words: Any
) -> FmhaProblem:
    return PARSERS[operation](OperationRequest(operation, dict(tensors), dict(outputs or {}), words))


def drawn(request: OperationRequest, seed: int = 0) -> dict[str, Array]:
    """Content for all inputs: random where anything goes."""
    rng = np.random.default_rng(seed)
    found = sample_inputs(request, rng)
    for name, item in request.inputs.items():
        if name not in found:
            found[name] = rng.standard_normal(item.shape).astype(np.float32).astype(item.dtype.numpy)
    return found

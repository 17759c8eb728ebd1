"""From a problem that was said without tensors to a request with some: sizes as they were said, nothing between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewright_fmha.vocabulary import (
    ATTENTION,
    ATTENTION_BACKWARD,
    KV_APPEND,
    BiasKind,
    KvLayout,
    KvLookup,
    MaskWord,
    QScale,
    Rope,
    vector_width,
)
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

if TYPE_CHECKING:
    from tilewright_fmha.compat.builder import FmhaSpec

__all__ = ["DROPOUT", "SOFT_CAP", "request_of"]

DROPOUT, SOFT_CAP = 0.2, 50.0
"""What stands for a probability and a cap that a problem only says it has."""

Descs = dict[str, TensorDesc]


def request_of(spec: FmhaSpec) -> OperationRequest:
    """The request of a ``FmhaSpec``. Raises ``InvalidArgumentError`` for sizes that no tensor has."""
    tensors, attributes = _plain(spec) if spec.operation != KV_APPEND else _append(spec)
    return OperationRequest(spec.operation, tensors, {}, attributes)


def _of(dtype: object, *shape: int) -> TensorDesc:
    return TensorDesc.of(str(dtype), shape)


def _plain(spec: FmhaSpec) -> tuple[Descs, dict[str, Any]]:
    dtype, batch, group = spec.data_type, spec.batch, spec.is_group_mode
    rows_q, rows_k = spec.seqlen_q, spec.seqlen_k
    lead = (batch * rows_q, spec.nhead_q) if group else (batch, spec.nhead_q, rows_q)
    tensors = {"q": _of(dtype.q, *lead, spec.hdim_q)}
    attributes: dict[str, Any] = {}
    if group:
        tensors["cu_seqlens_q"] = _of("int32", batch + 1)
        attributes["max_seqlen_q"] = spec.max_seqlen_q
    if spec.use_paged_kv:
        tensors |= _pages(spec, "k", "v", attributes)
        tensors["seqlens_k"] = _of("int32", batch)
    else:
        own = (batch * rows_k, spec.nhead_k) if group else (batch, spec.nhead_k, rows_k)
        tensors |= {"k": _of(dtype.kv, *own, spec.hdim_q), "v": _values(spec, own)}
        if group:
            tensors["cu_seqlens_k"] = _of("int32", batch + 1)
            attributes["max_seqlen_k"] = spec.effective_max_seqlen_k
    _scores(spec, tensors, attributes)
    if spec.operation == ATTENTION_BACKWARD:
        tensors |= {name: _of(dtype.o, *lead, spec.hdim_v) for name in ("o", "do")}
        tensors["lse"] = _of("fp32", *((spec.nhead_q, batch * rows_q) if group else lead))
        attributes |= _flags(return_dbias=spec.has_dbias, return_randval=spec.is_store_randval)
        attributes["deterministic"] = spec.is_deterministic
    else:
        assert spec.operation == ATTENTION
        attributes |= _flags(return_lse=spec.has_lse, return_randval=spec.is_store_randval)
        attributes |= {"min_seqlen_q": 1} if spec.skip_min_seqlen_q else {}
        attributes |= {"num_splits": spec.num_splits} if spec.num_splits > 1 else {}
        if dtype.is_fp8:
            attributes["out_dtype"] = dtype.o.value
        _factors(spec, tensors, attributes)
    return tensors, attributes


def _flags(**flags: bool) -> dict[str, bool]:
    return {name: True for name, value in flags.items() if value}


def _values(spec: FmhaSpec, lead: tuple[int, ...]) -> TensorDesc:
    """v, its values' elements or the same element of its values being neighbours."""
    plain = _of(spec.data_type.kv, *lead, spec.hdim_v)
    if spec.is_v_rowmajor or not plain.size:
        return plain
    rows = lead[0] if spec.is_group_mode else lead[2]
    if spec.is_group_mode:  # [rows, heads, elements]
        strides: tuple[int, ...] = (1, rows * spec.hdim_v, rows)
    else:
        strides = (lead[1] * rows * spec.hdim_v, rows * spec.hdim_v, 1, rows)
    return TensorDesc.of(plain.dtype, plain.shape, strides)


def _pages(spec: FmhaSpec, k_name: str, v_name: str, attributes: dict[str, Any]) -> Descs:
    page, width = spec.page_size, vector_width(spec.data_type.kv)
    each = -(-max(spec.effective_max_seqlen_k, spec.seqlen_k) // max(page, 1))
    pages, heads, dtype = spec.batch * each, spec.nhead_k, spec.data_type.kv
    if spec.kv_memory_layout is KvLayout.VECTORIZED:
        attributes["kv_layout"] = "vectorized"
        found = {
            k_name: _of(dtype, pages, heads, spec.hdim_q // width, page, width),
            v_name: _of(dtype, pages, heads, page // width, spec.hdim_v, width),
        }
    else:
        found = {
            name: _of(dtype, pages, page, heads, hdim) for name, hdim in ((k_name, spec.hdim_q), (v_name, spec.hdim_v))
        }
    if spec.kv_lookup_table is KvLookup.SGLANG:
        return {**found, "block_table": _of("int32", pages), "page_starts": _of("int32", spec.batch + 1)}
    return {**found, "block_table": _of("int32", spec.batch, each)}


def _scores(spec: FmhaSpec, tensors: Descs, attributes: dict[str, Any]) -> None:
    if spec.mask_type is not MaskWord.NO:
        attributes["mask"] = spec.mask_type.value
        attributes["window_left"] = spec.window_size_left
        if spec.mask_type is MaskWord.GENERIC:
            attributes["window_right"] = spec.window_size_right
    if spec.sink_size:
        attributes["sink_size"] = spec.sink_size
    elif spec.has_sink:
        tensors["sinks"] = _of("fp32", spec.nhead_q)
    if spec.bias_type is BiasKind.ALIBI:
        tensors["alibi_slopes"] = _of("fp32", spec.nhead_q)
    elif spec.bias_type is BiasKind.ELEMENTWISE:
        rows = min(spec.effective_max_seqlen_q, spec.batch * spec.seqlen_q) if spec.is_group_mode else spec.seqlen_q
        columns = spec.effective_max_seqlen_k if spec.is_group_mode else spec.seqlen_k
        dtype = spec.data_type.q if spec.data_type.q.bytes > 1 else "fp32"
        tensors["bias"] = _of(dtype, 1, spec.nhead_q, rows, columns)
    if spec.has_logits_soft_cap:
        attributes["softcap"] = SOFT_CAP
    if spec.has_dropout:
        attributes["dropout_p"] = DROPOUT


def _factors(spec: FmhaSpec, tensors: Descs, attributes: dict[str, Any]) -> None:
    kind, batch = spec.qscale_type, spec.batch
    if kind is QScale.NO:
        return
    attributes["qscale"] = kind.value
    block = 128
    sizes = {
        "q": (spec.nhead_q, -(-(spec.max_seqlen_q or spec.seqlen_q) // block)),
        "k": (spec.nhead_k, -(-spec.effective_max_seqlen_k // block)),
    }
    for name in "qkv":
        if name == "q" and not spec.data_type.is_fp8:
            continue
        heads, blocks = sizes["q" if name == "q" else "k"]
        shape: tuple[int, ...] = ()
        if kind is QScale.BLOCKSCALE:
            shape = (batch, heads, blocks)
        elif kind is QScale.KV_BLOCKSCALE and name != "q" and "block_table" in tensors:
            shape = (tensors["k"].shape[0], heads)
        tensors[f"{name}_descale"] = _of("fp32", *shape)


def _append(spec: FmhaSpec) -> tuple[Descs, dict[str, Any]]:
    """New rows are as many as queries; a cache has room for ``seqlen_k``."""
    dtype, batch, rows, group = spec.data_type, spec.batch, spec.seqlen_q, spec.is_group_mode
    lead = (batch * rows, spec.nhead_k) if group else (batch, spec.nhead_k, rows)
    attributes: dict[str, Any] = {}
    tensors = {"k_new": _of(dtype.kv, *lead, spec.hdim_q), "v_new": _of(dtype.kv, *lead, spec.hdim_v)}
    if group:
        tensors["cu_seqlens_q"] = _of("int32", batch + 1)
        attributes["max_seqlen_q"] = spec.max_seqlen_q
    if spec.use_paged_kv:
        tensors |= _pages(spec, "k_past", "v_past", attributes)
    else:
        cache = (batch, spec.nhead_k, spec.seqlen_k)
        tensors |= {"k_past": _of(dtype.kv, *cache, spec.hdim_q), "v_past": _of(dtype.kv, *cache, spec.hdim_v)}
    tensors["seqlens_k"] = _of("int32", batch)
    if spec.rope_type is not Rope.NONE:
        attributes["rope"] = spec.rope_type.value
        shape = (max(spec.seqlen_k, 1), spec.hdim_q // 2)
        tensors |= {name: _of("fp32", *shape) for name in ("rotary_cos", "rotary_sin")}
        queries = (batch * rows, spec.nhead_q) if group else (batch, spec.nhead_q, rows)
        tensors["q"] = _of(dtype.q, *queries, spec.hdim_q)
    return tensors, attributes

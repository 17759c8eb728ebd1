"""Problems of the same kind with other sizes, for which the model is compared with measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright_fmha.problem.parse.attention import parse_attention, parse_backward
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, QScale, Scores, VLayout
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import TilewrightError
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["resized_fmha"]

_NEEDED = ("batch", "heads_q", "heads_k", "seq_q", "seq_k")
_MOST = 2**31 - 1


def resized_fmha(problem: FmhaProblem, sizes: Mapping[str, int]) -> FmhaProblem | None:
    """Other batches, heads, lengths and head dimensions with the same features, its tensors without gaps.

    None for appends, block scales, shared prefixes and vectorized pages, whose sizes say more than these, and for sizes
    that lack one or fit no attention.
    """
    if problem.shared is not None:
        return None
    unknown = problem.operation not in (ATTENTION, ATTENTION_BACKWARD) or problem.operand("k").desc.shape[4:]
    if unknown or problem.qscale in (QScale.BLOCKSCALE, QScale.KV_BLOCKSCALE) or not set(_NEEDED) <= set(sizes):
        return None
    if max(sizes[name] for name in _NEEDED) > _MOST or min(sizes[name] for name in _NEEDED) < 0:
        return None
    try:
        request = _request(problem, {"hdim_q": problem.hdim_q, "hdim_v": problem.hdim_v, **sizes})
        return parse_attention(request) if problem.operation == ATTENTION else parse_backward(request)
    except TilewrightError:
        return None


def _of(dtype: object, *shape: int) -> TensorDesc:
    return TensorDesc.of(str(dtype), shape)


def _request(problem: FmhaProblem, sizes: Mapping[str, int]) -> OperationRequest:
    batch, heads_q, heads_k, rows_q, rows_k = (sizes[name] for name in _NEEDED)
    hdim_q, hdim_v, word = sizes["hdim_q"], sizes["hdim_v"], problem.dtype
    lead = (batch * rows_q, heads_q) if problem.varlen else (batch, heads_q, rows_q)
    tensors = {"q": _of(word.q, *lead, hdim_q)}
    attributes: dict[str, Any] = {"alignment": problem.alignment}
    if problem.varlen:
        tensors["cu_seqlens_q"] = _of("int32", batch + 1)
        attributes["max_seqlen_q"] = max(rows_q, 1)
    paging = problem.paging
    if paging is not None:
        each = -(-rows_k // paging.page_size)
        for name, hdim in (("k", hdim_q), ("v", hdim_v)):
            tensors[name] = _of(word.kv, batch * each, paging.page_size, heads_k, hdim)
        if problem.has("page_starts"):
            tensors |= {"block_table": _of("int32", batch * each), "page_starts": _of("int32", batch + 1)}
        else:
            tensors["block_table"] = _of("int32", batch, each)
        attributes["max_seqlen_k"] = max(rows_k, 1)
    else:
        own = (batch * rows_k, heads_k) if problem.varlen else (batch, heads_k, rows_k)
        tensors |= {"k": _of(word.kv, *own, hdim_q), "v": _values(problem, own, hdim_v)}
        if problem.varlen:
            tensors["cu_seqlens_k"] = _of("int32", batch + 1)
            attributes["max_seqlen_k"] = max(rows_k, 1)
    if problem.v_in_k:
        del tensors["v"]
        attributes["head_dim_v"] = hdim_v
    for name in ("seqlens_q", "seqlens_k", "cache_index"):
        if problem.has(name):
            tensors[name] = _of("int32", batch)
    _features(problem, tensors, attributes, (batch, heads_q, rows_q, rows_k))
    outputs: dict[str, TensorDesc] = {}
    if problem.operation == ATTENTION_BACKWARD:
        tensors |= {name: _of(word.o, *lead, hdim_v) for name in ("o", "do")}
        tensors["lse"] = _of("fp32", *((heads_q, batch * rows_q) if problem.varlen else lead))
        attributes |= {"return_dbias": problem.dbias, "deterministic": problem.deterministic}
    else:
        attributes |= {"return_lse": problem.lse, "return_status": problem.status, "out_dtype": word.o.value}
        attributes |= {"num_splits": problem.num_splits, "min_seqlen_q": problem.min_q}
        if problem.scores is not Scores.NONE:
            attributes["return_scores"] = problem.scores.value
    return OperationRequest(problem.operation, tensors, outputs, attributes)


def _values(problem: FmhaProblem, lead: tuple[int, ...], hdim: int) -> TensorDesc:
    plain = _of(problem.dtype.kv, *lead, hdim)
    if problem.v_layout is VLayout.VR:
        return plain
    rows = max(lead[0] if problem.varlen else lead[2], 1)
    own = (1, rows * hdim, rows) if problem.varlen else (lead[1] * rows * hdim, rows * hdim, 1, rows)
    return TensorDesc.of(plain.dtype, plain.shape, own)


def _features(
    problem: FmhaProblem, tensors: dict[str, TensorDesc], attributes: dict[str, Any], sizes: tuple[int, int, int, int]
) -> None:
    batch, heads, rows_q, rows_k = sizes
    mask = problem.mask
    attributes |= {"scale": problem.scale, "window_left": mask.left, "window_right": mask.right}
    attributes |= {"sink_size": mask.sink, "mask_align": "bottom_right" if mask.bottom_right else "top_left"}
    if problem.softcap:
        attributes["softcap"] = problem.softcap
    if problem.dropout:
        attributes |= {"dropout_p": problem.drop_probability, "return_randval": problem.randval}
        if problem.has("rng"):
            tensors["rng"] = _of("int32", 4)
        else:
            attributes |= {"seed": problem.seed, "offset": problem.offset}
    if problem.dtype_bias is not None:
        old = problem.operand("bias").desc.shape
        full = (1 if problem.varlen else batch, heads, rows_q, rows_k)
        new = (have if have == 1 else size for have, size in zip(old, full, strict=True))
        tensors["bias"] = _of(problem.dtype_bias, *new)
    if problem.has("alibi_slopes"):
        both = len(problem.operand("alibi_slopes").desc.shape) == 2
        tensors["alibi_slopes"] = _of("fp32", *((batch, heads) if both else (heads,)))
    if problem.learned_sinks:
        tensors["sinks"] = _of("fp32", heads)
    if problem.qscale is QScale.PERTENSOR:
        attributes["qscale"] = "pertensor"
        for name in ("q_descale", "k_descale", "v_descale"):
            if problem.has(name):
                tensors[name] = _of("fp32")

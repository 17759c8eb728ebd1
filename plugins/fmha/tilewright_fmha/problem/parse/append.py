"""Requests for new rows in a cache: one of items of a fixed room, or one of pages."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright_fmha.problem.attributes import Attributes, read_attributes
from tilewright_fmha.problem.operands import Tensors, check_index, read_tensors
from tilewright_fmha.problem.parse.keys import cache_items_of, read_paging
from tilewright_fmha.problem.parse.options import read_divisors
from tilewright_fmha.problem.problem import KvAppendProblem, Paging
from tilewright_fmha.problem.shapes import Sizes, check_hdims, check_heads, check_pair, check_work, rank, read_queries
from tilewright_fmha.vocabulary import FmhaDType, Rope
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["parse_append"]


@dataclass(frozen=True, slots=True)
class _Rotary:
    rope: Rope = Rope.NONE
    dim: int = 0
    rows: int = 0
    dtype: DType | None = None


def parse_append(request: OperationRequest) -> KvAppendProblem:
    """Check a request and infer what it left out. Raises ``InvalidArgumentError`` or ``UnsupportedError``."""
    tensors = read_tensors(request)
    attributes = read_attributes(request.attributes, request.operation)
    sizes = read_queries(tensors, attributes, "k_new")
    new_rows, heads = sizes.seq_q, sizes.heads_q
    k_new, v_new = tensors.inputs["k_new"], tensors.inputs["v_new"]
    rank("v_new", v_new, len(k_new.shape), "as many as k_new has")
    check_pair(sizes, ("k_new", k_new), ("v_new", v_new), 1)
    paging = _cache(tensors, attributes, sizes)
    if v_new.shape[-1] != sizes.hdim_v or sizes.heads_k != heads:
        name, cache = ("v_new", "v_past") if sizes.heads_k == heads else ("k_new", "k_past")
        raise refuse(
            f"{name} and {cache} have different heads or elements",
            f"{name}.shape",
            tensors.inputs[name].shape,
            "head_dims_agree",
            f"give {name} with the {sizes.heads_k} heads and the elements of {cache}",
        )
    check_index(tensors, "seqlens_k", (sizes.batch,), "batch_agrees", f"give {sizes.batch} lengths, one a sequence")
    _queries(tensors, sizes, heads)
    dtype = _dtype(tensors)
    new, cache = (tensors.inputs[name].dtype for name in ("k_new", "k_past"))
    scaling = read_divisors(tensors, attributes, sizes, new, cache)
    rotary = _rotary(tensors, attributes, sizes, dtype)
    check_work(0, sizes, "k_past", tensors.inputs["k_past"])
    _outputs(tensors, attributes, sizes, paging)
    return KvAppendProblem(
        dtype=dtype,
        batch=sizes.batch,
        heads_q=sizes.heads_q,
        heads_k=sizes.heads_k,
        seq_q=new_rows if "q" in tensors.inputs else 0,
        seq_k=sizes.seq_k,
        hdim_q=sizes.hdim_q,
        hdim_v=sizes.hdim_v,
        tensors=tensors.operands(),
        places=tuple(tensors.places.values()),
        varlen=sizes.varlen,
        total_q=sizes.total_q,
        total_k=sizes.total_k,
        status="status" in tensors.outputs,
        paging=paging,
        scaling=scaling,
        rope=rotary.rope,
        dtype_rope=rotary.dtype,
        rotary_dim=rotary.dim,
        rotary_rows=rotary.rows,
        new_rows=new_rows,
        cache_items=0 if paging else tensors.inputs["k_past"].shape[0],
        alignment=attributes.alignment,
    )


def _cache(tensors: Tensors, attributes: Attributes, sizes: Sizes) -> Paging | None:
    k_past, v_past = tensors.inputs["k_past"], tensors.inputs["v_past"]
    for name in ("k_new", "v_new"):
        tensors.place(name, sizes.varlen)
    if "block_table" in tensors.inputs:
        return read_paging(tensors, attributes, sizes, "k_past", "v_past", "k_new")
    for name in ("page_starts", "page_size", "kv_layout", "kv_lookup"):
        value = tensors.desc(name) if name == "page_starts" else getattr(attributes, name)
        if value is not None:
            raise refuse(
                f"{name} is given, but the cache is not in pages",
                name if name == "page_starts" else f"attributes.{name}",
                "" if name == "page_starts" else str(value),
                "lookup_operands",
                f"give block_table, or leave {name} out",
            )
    for name, desc in (("k_past", k_past), ("v_past", v_past)):
        rank(name, desc, 4, "[items, heads, room, elements], or block_table with pages")
    check_pair(sizes, ("k_past", k_past), ("v_past", v_past), 1)
    cache_items_of(tensors, sizes, "k_past", k_past)
    new = ("k_new", tensors.inputs["k_new"])
    check_hdims(sizes, new, ("k_past", k_past), ("v_past", v_past), k_past.shape[-1], v_past.shape[-1])
    if attributes.max_k is not None and attributes.max_k > k_past.shape[2]:
        raise refuse(
            f"max_seqlen_k is {attributes.max_k}, but an item of the cache has room for {k_past.shape[2]}",
            "attributes.max_seqlen_k",
            attributes.max_k,
            "max_seqlen_given",
            "leave max_seqlen_k out",
        )
    sizes.seq_k, sizes.total_k = attributes.max_k or k_past.shape[2], k_past.shape[0] * k_past.shape[2]
    for name in ("k_past", "v_past"):
        tensors.place(name, False)
    return None


def _queries(tensors: Tensors, sizes: Sizes, heads: int) -> None:
    """``q`` has the rows of ``k_new``, and heads of its own."""
    q = tensors.desc("q")
    k_new = tensors.inputs["k_new"]
    if q is None:
        sizes.heads_q = heads
        check_heads(sizes, "k_past", tensors.inputs["k_past"])
        return
    rank("q", q, len(k_new.shape), "as many as k_new has")
    wanted = (*k_new.shape[:1], q.shape[1], *k_new.shape[2:])
    if q.shape != wanted:
        raise refuse(
            f"q has shape {list(q.shape)}, but k_new {list(k_new.shape)}",
            "q.shape",
            q.shape,
            "batch_agrees",
            f"give {list(wanted)}: a query for every new key, in as many heads as you like",
        )
    sizes.heads_q = q.shape[1]
    check_heads(sizes, "k_past", tensors.inputs["k_past"])
    tensors.place("q", sizes.varlen)


def _dtype(tensors: Tensors) -> FmhaDType:
    """The word for new rows (and queries) and a cache of their type, or of fp8 for rows of 16 bits."""
    cache, new = tensors.inputs["k_past"].dtype, tensors.inputs["k_new"].dtype
    rounded = cache is DType.FP8 and new in (DType.FP16, DType.BF16)
    pairs = [("v_past", cache, "k_past"), ("k_new", new if rounded else cache, "k_past"), ("v_new", new, "k_new")]
    pairs += [("q", new, "k_new")] if rounded and "q" in tensors.inputs else []
    for name, wanted, other in pairs:
        have = tensors.inputs[name].dtype
        if have != wanted:
            more = ", or both as fp16 or bf16, which are rounded" if cache is DType.FP8 and name == "k_new" else ""
            raise refuse(
                f"{name} is {have}, but {other} is {wanted}",
                f"{name}.dtype",
                have.value,
                "dtype_combination",
                f"give {name} as {wanted}{more}",
            )
    q = tensors.inputs["q"].dtype if "q" in tensors.inputs else new
    choices = [word for word in FmhaDType if (word.q, word.kv) == (q, cache) and not word.value.startswith("mx")]
    if not choices:
        name = "q" if "q" in tensors.inputs and cache.is_float else "k_past"
        raise refuse(
            f"there is no cache of {cache} for {q} queries",
            f"{name}.dtype",
            tensors.inputs[name].dtype.value,
            "dtype_combination",
            "use fp32, fp16, bf16 or fp8, for queries and cache alike (an fp8 cache takes fp16 and bf16 queries too)",
        )
    return choices[0]


def _rotary(tensors: Tensors, attributes: Attributes, sizes: Sizes, dtype: FmhaDType) -> _Rotary:
    given = {name: tensors.inputs[name] for name in ("rotary_cos", "rotary_sin") if name in tensors.inputs}
    rope = attributes.rope
    if not given and rope in (None, Rope.NONE):
        if "q" in tensors.inputs or attributes.rotary_dim:
            raise refuse(
                "queries are appended to nothing: they are only rotated, and no table says how"
                if "q" in tensors.inputs
                else "rotary_dim is given, but nothing rotates",
                "q" if "q" in tensors.inputs else "attributes.rotary_dim",
                attributes.rotary_dim,
                "rotary_shape",
                "give rotary_cos and rotary_sin, or leave it out",
            )
        return _Rotary()
    if len(given) < 2 or rope is Rope.NONE:
        missing = next((name for name in ("rotary_cos", "rotary_sin") if name not in given), "")
        raise refuse(
            f"{missing} is missing" if missing else "rope is none, but rotary tables are given",
            missing or "attributes.rope",
            "",
            "rotary_shape",
            "give rotary_cos and rotary_sin, each [positions, rotary_dim / 2], and rope=interleaved or rope=half",
        )
    cos, sin = given["rotary_cos"], given["rotary_sin"]
    dim = _rotary_dim(attributes, sizes, cos, sin)
    allowed = tuple(dict.fromkeys((DType.FP32, *((dtype.q,) if dtype.q.bytes > 1 else ()))))
    for name, desc in given.items():
        if desc.dtype not in allowed or desc.dtype != cos.dtype:
            raise refuse(
                f"{name} cannot be {desc.dtype} here",
                f"{name}.dtype",
                desc.dtype.value,
                "rotary_dtype",
                f"give both as one of: {', '.join(allowed)}",
            )
        if desc.strides != cos.strides or (desc.strides[1] != 1 and desc.shape[1] > 1):
            raise refuse(
                f"{name} has strides {list(desc.strides)}",
                f"{name}.strides",
                desc.strides,
                "rotary_shape",
                "give both tables with the same strides, a row's numbers being neighbours",
            )
    return _Rotary(rope or Rope.INTERLEAVED, dim, cos.shape[0], cos.dtype)


def _rotary_dim(attributes: Attributes, sizes: Sizes, cos: TensorDesc, sin: TensorDesc) -> int:
    for name, desc in (("rotary_cos", cos), ("rotary_sin", sin)):
        if len(desc.shape) != 2 or desc.shape != cos.shape:
            raise refuse(
                f"{name} has shape {list(desc.shape)}",
                f"{name}.shape",
                desc.shape,
                "rotary_shape",
                "give both tables as [positions, rotary_dim / 2]",
            )
    dim = 2 * cos.shape[1]
    if attributes.rotary_dim not in (0, dim):
        raise refuse(
            f"rotary_dim is {attributes.rotary_dim}, but rotary_cos has {cos.shape[1]} columns, one for two elements",
            "attributes.rotary_dim",
            attributes.rotary_dim,
            "rotary_shape",
            f"leave rotary_dim out, or set it to {dim}",
        )
    if not 0 < dim <= sizes.hdim_q:
        raise refuse(
            f"{dim} elements of {sizes.hdim_q} cannot be rotated",
            "rotary_cos.shape",
            cos.shape,
            "rotary_dim_range",
            f"give tables of 1 to {sizes.hdim_q // 2} columns",
        )
    return dim


def _outputs(tensors: Tensors, attributes: Attributes, sizes: Sizes, paging: Paging | None) -> None:
    for past, cache in (("k_past", "k_cache"), ("v_past", "v_cache")):
        like, given = tensors.inputs[past], tensors.given.get(cache)
        if given is not None and given != like:
            raise refuse(
                f"{cache} is not described as {past} is",
                f"{cache}.shape",
                given.shape,
                "in_place_shape",
                f"give {cache} the shape, strides and element type of {past}: as a rule it is the same memory",
            )
        tensors.given[cache] = like
        tensors.output(cache, like.shape, like.dtype)
        axes = "bhrc"
        if paging is not None:
            axes = "brhc" if len(like.shape) == 4 else ("bhkrx" if cache == "k_cache" else "bhkcx")
        tensors.place(cache, False, axes)
    if "q" in tensors.inputs:
        q = tensors.inputs["q"]
        tensors.output("q_out", q.shape, q.dtype, q)
        tensors.place("q_out", sizes.varlen)
    elif "q_out" in tensors.given:
        raise refuse(
            "q_out is described, but there are no queries to rotate",
            "q_out",
            tensors.given["q_out"].shape,
            "operand_missing",
            "give q, or leave q_out out",
        )
    if "seqlens_out" in tensors.given:
        tensors.plain_output("seqlens_out", (sizes.batch,), DType.INT32)
    if attributes.status or "status" in tensors.given:
        tensors.plain_output("status", (4,), DType.INT32)

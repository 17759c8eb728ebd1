"""Sizes of a request: heads, head dimensions, sequences of one size or end to end, and the shapes that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright_fmha.problem.attributes import Attributes
from tilewright_fmha.problem.declared.attributes import MOST
from tilewright_fmha.problem.operands import Tensors, check_index
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.types.tensor import MAX_ELEMENTS, TensorDesc

__all__ = ["MAX_HDIM", "Sizes", "check_heads", "check_lengths", "check_pair", "check_work", "rank", "read_queries"]

MAX_FLOPS = 2**62
MIN_HDIM, MAX_HDIM = 1, 1024


@dataclass(slots=True)
class Sizes:
    """Sizes that shapes imply. ``seq`` are capacities, ``total`` all rows."""

    varlen: bool
    batch: int
    heads_q: int
    heads_k: int = 0
    seq_q: int = 0
    seq_k: int = 0
    total_q: int = 0
    total_k: int = 0
    hdim_q: int = 0
    hdim_v: int = 0

    @property
    def query_shape(self) -> tuple[int, ...]:
        """Shape of q; that of o has another last number."""
        if self.varlen:
            return (self.total_q, self.heads_q, self.hdim_q)
        return (self.batch, self.heads_q, self.seq_q, self.hdim_q)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.query_shape[:-1], self.hdim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (self.heads_q, self.total_q) if self.varlen else (self.batch, self.heads_q, self.seq_q)

    @property
    def randval_shape(self) -> tuple[int, ...]:
        return (*self.lse_shape, self.seq_k)


def rank(name: str, desc: TensorDesc, wanted: int, what: str, rule: str = "tensor_rank") -> None:
    if len(desc.shape) != wanted:
        raise refuse(
            f"{name} has {len(desc.shape)} dimensions, not {wanted}", f"{name}.shape", desc.shape, rule, f"give {what}"
        )


def read_queries(tensors: Tensors, attributes: Attributes, name: str = "q") -> Sizes:
    """Batch and rows, by the tensor ``name`` and whether ``cu_seqlens_q`` is there."""
    desc, starts = tensors.inputs[name], tensors.desc("cu_seqlens_q")
    if starts is None:
        rank(name, desc, 4, "[batch, heads, rows, elements], or cu_seqlens_q with sequences end to end")
        if attributes.max_q is not None:
            raise refuse(
                f"max_seqlen_q is for sequences end to end, but {name} has items of {desc.shape[2]} rows",
                "attributes.max_seqlen_q",
                attributes.max_q,
                "varlen_operands",
                "leave max_seqlen_q out, or give cu_seqlens_q",
            )
        batch, heads, rows, hdim = desc.shape
        _int32(name, desc, rows, batch)
        return Sizes(False, batch, heads, seq_q=rows, total_q=batch * rows, hdim_q=hdim)
    rank(name, desc, 3, "[rows of all sequences, heads, elements] with cu_seqlens_q")
    total, heads, hdim = desc.shape
    if len(starts.shape) != 1 or starts.shape[0] < 1:
        raise refuse(
            f"cu_seqlens_q has shape {list(starts.shape)}",
            "cu_seqlens_q.shape",
            starts.shape,
            "varlen_operands",
            "give the first row of each sequence and the end of the last: int32 [sequences + 1]",
        )
    check_index(tensors, "cu_seqlens_q", starts.shape, "varlen_operands", "")
    if attributes.max_q is None:
        raise refuse(
            "max_seqlen_q is needed: lengths are data, which no plan looks at",
            "attributes.max_seqlen_q",
            "",
            "max_seqlen_given",
            "give the most rows that any sequence has",
        )
    batch = starts.shape[0] - 1
    _int32(name, desc, total, batch)
    return Sizes(True, batch, heads, seq_q=min(attributes.max_q, total), total_q=total, hdim_q=hdim)


def _int32(name: str, desc: TensorDesc, *numbers: int) -> None:
    if max(numbers) > MOST:
        raise refuse(
            f"{name} has more rows or items than an int32 counts",
            f"{name}.shape",
            desc.shape,
            "size_overflow",
            "split the problem",
        )


def check_heads(sizes: Sizes, name: str, desc: TensorDesc) -> None:
    """Query heads fall into equal groups, one for each head of keys."""
    heads_q, heads_k = sizes.heads_q, sizes.heads_k
    if heads_q < 1 or heads_k < 1 or heads_q % heads_k:
        common = math.gcd(heads_q, heads_k)
        raise refuse(
            f"{heads_q} query heads do not fall into {heads_k} equal groups",
            f"{name}.shape",
            desc.shape,
            "head_groups",
            f"use a number of key heads that divides {heads_q}"
            + (f", such as {common}" if heads_q > 0 and heads_k > 0 else " (both at least 1)"),
        )


def check_hdim(name: str, desc: TensorDesc, hdim: int) -> None:
    """A head has elements, and not more than any kernel's; which of these a device has kernels for is said by rules."""
    if not MIN_HDIM <= hdim <= MAX_HDIM:
        raise refuse(
            f"{name} has heads of {hdim} elements",
            f"{name}.shape",
            desc.shape,
            "hdim_range",
            f"use heads of {MIN_HDIM} to {MAX_HDIM} elements",
        )


def check_pair(sizes: Sizes, first: tuple[str, TensorDesc], second: tuple[str, TensorDesc], heads: int) -> None:
    """Keys and values have the same leading sizes and as many heads; ``heads`` is the axis of these."""
    (k_name, k), (v_name, v) = first, second
    if k.shape[:-1] != v.shape[:-1]:
        raise refuse(
            f"{v_name} has shape {list(v.shape)}, but {k_name} has {list(k.shape)}",
            f"{v_name}.shape",
            v.shape,
            "kv_lengths_agree",
            f"give as many heads and rows of {v_name} as of {k_name}; only the last size may differ",
        )
    sizes.heads_k = k.shape[heads]


def check_hdims(sizes: Sizes, q: tuple[str, TensorDesc], k: tuple[str, TensorDesc], v: tuple[str, TensorDesc],
                hdim_k: int, hdim_v: int) -> None:  # fmt: skip
    if hdim_k != sizes.hdim_q:
        raise refuse(
            f"{k[0]} has heads of {hdim_k} elements, but {q[0]} of {sizes.hdim_q}",
            f"{k[0]}.shape",
            k[1].shape,
            "head_dims_agree",
            f"give keys of {sizes.hdim_q} elements: a score is a product of a whole query and a whole key",
        )
    check_hdim(q[0], q[1], sizes.hdim_q)
    check_hdim(v[0], v[1], hdim_v)
    sizes.hdim_v = hdim_v


def check_lengths(tensors: Tensors, sizes: Sizes) -> None:
    """``seqlens_q`` and ``seqlens_k``: one true length for each sequence."""
    for name in ("seqlens_q", "seqlens_k"):
        if name in tensors.inputs:
            check_index(tensors, name, (sizes.batch,), "batch_agrees", f"give {sizes.batch} lengths, one a sequence")


def check_work(flops: int, sizes: Sizes, name: str, desc: TensorDesc) -> None:
    """Every number stays exact in 64 bits."""
    pairs = max(sizes.batch, 1) * max(sizes.heads_q, 1) * max(sizes.seq_q, 1) * max(sizes.hdim_q, sizes.hdim_v)
    if flops > MAX_FLOPS or pairs > MAX_ELEMENTS or max(sizes.seq_k, sizes.seq_q) > MOST:
        raise refuse(
            "the problem has more than 2**62 operations, or more rows than an int32 counts",
            f"{name}.shape",
            desc.shape,
            "size_overflow",
            "split the problem",
        )

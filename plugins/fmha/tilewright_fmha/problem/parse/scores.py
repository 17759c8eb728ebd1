"""Fields that forward and backward read alike: the fields of a problem that say how its scores are made."""

from __future__ import annotations

from typing import Any

from tilewright_fmha.problem.attributes import Attributes
from tilewright_fmha.problem.operands import Tensors
from tilewright_fmha.problem.parse.options import read_bias, read_rng, read_sinks
from tilewright_fmha.problem.shapes import Sizes
from tilewright_fmha.vocabulary import FmhaDType

__all__ = ["score_fields"]


def score_fields(tensors: Tensors, attributes: Attributes, sizes: Sizes, dtype: FmhaDType) -> dict[str, Any]:
    """Fields of ``FmhaProblem``. Raises ``InvalidArgumentError`` for a bias, sinks or seeds that do not fit."""
    bias, dtype_bias = read_bias(tensors, sizes, dtype.q)
    learned_sinks = read_sinks(tensors, sizes)
    seed, offset = read_rng(tensors, attributes)
    return {
        "dtype": dtype,
        "batch": sizes.batch,
        "heads_q": sizes.heads_q,
        "heads_k": sizes.heads_k,
        "seq_q": sizes.seq_q,
        "seq_k": sizes.seq_k,
        "hdim_q": sizes.hdim_q,
        "hdim_v": sizes.hdim_v,
        "varlen": sizes.varlen,
        "total_q": sizes.total_q,
        "total_k": sizes.total_k,
        "mask": attributes.mask,
        "scale": attributes.scale or sizes.hdim_q**-0.5,
        "softcap": attributes.softcap,
        "dropout": attributes.dropout,
        "seed": seed,
        "offset": offset,
        "bias": bias,
        "dtype_bias": dtype_bias,
        "learned_sinks": learned_sinks,
        "alignment": attributes.alignment,
    }

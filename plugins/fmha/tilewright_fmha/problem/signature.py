"""Requirements of a problem on a kernel: the signature fields of its configuration, by name."""

from __future__ import annotations

from typing import Any

from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import BiasKind, Family, KvLayout, KvLookup, MaskKind, Rope, Scores, SmallType
from tilewright_kit.types.dtypes import DType

__all__ = ["bias_type", "signature_of"]


def signature_of(problem: FmhaProblem) -> dict[str, Any]:
    """Signature fields of a configuration that computes ``problem`` without splitting.

    ``hdim`` is the problem's own: configurations have the next larger ones of their arch. What means nothing to the
    family has its default, as rule ``family_fields`` has it: ``lse`` says that a forward kernel writes it (backward
    always reads it), and only ``kv_append`` knows ``rope``. ``page_size`` is 0, of any size: fixed ones are an
    algorithm's choice.
    """
    mask, paging, family = problem.mask, problem.paging, problem.family
    append, backward = family is Family.APPENDKV, family is Family.DQ_DK_DV
    return {
        "family": family,
        "dtype": problem.dtype,
        "mode": problem.mode,
        "v_layout": problem.v_layout,
        "hdim": (problem.hdim_q, problem.hdim_v),
        "mask": MaskKind.NONE if append else mask.kind,
        "bias": problem.bias,
        "dtype_bias": _small(DType.FP32, problem.dtype.q) if problem.joint_bias else bias_type(problem),
        "rope_dtype": _small(problem.dtype_rope, problem.dtype.q) if problem.rope is not Rope.NONE else SmallType.AS_Q,
        "lse": (problem.lse or problem.scores is Scores.PROBABILITIES) and not backward and not append,
        "dropout": problem.has_dropout,
        "softcap": problem.softcap > 0,
        "sink": mask.sink > 0,
        "learned_sinks": problem.learned_sinks,
        "skip_min_seqlen_q": problem.min_q > 0,
        "dbias": problem.dbias,
        "randval": problem.randval,
        "deterministic": backward and problem.deterministic,
        "paged": paging is not None,
        "qscale": problem.qscale,
        "rope": problem.rope,
        "kv_layout": paging.layout if paging else KvLayout.LINEAR,
        "kv_lookup": paging.lookup if paging else KvLookup.VLLM,
        "page_size": 0,
    }


def bias_type(problem: FmhaProblem) -> SmallType:
    """The element type of the bias as the caller gave it."""
    elementwise = problem.bias is BiasKind.ELEMENTWISE
    return _small(problem.dtype_bias, problem.dtype.q) if elementwise else SmallType.AS_Q


def _small(dtype: DType | None, q: DType) -> SmallType:
    return SmallType.AS_Q if dtype in (None, q) else SmallType(str(dtype))

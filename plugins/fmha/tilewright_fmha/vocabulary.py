"""The vocabulary of attention: families of kernels, element types, masks, biases, and how a cache lies in memory."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Word

__all__ = [
    "API_FAMILIES",
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "DTYPE_ALIASES",
    "FAMILY_OPERATIONS",
    "KV_APPEND",
    "MAIN_FAMILIES",
    "MASK_ALIASES",
    "OPERATIONS",
    "ROPE_ALIASES",
    "VARIANT_ALIASES",
    "BiasKind",
    "Family",
    "FmhaDType",
    "KvLayout",
    "KvLookup",
    "MaskKind",
    "MaskWord",
    "Mode",
    "QScale",
    "Rope",
    "Scheduling",
    "Scores",
    "SmallType",
    "VLayout",
    "vector_width",
]

ATTENTION, ATTENTION_BACKWARD, KV_APPEND = "attention", "attention_backward", "kv_append"
OPERATIONS = (ATTENTION, ATTENTION_BACKWARD, KV_APPEND)


class Family(Word):
    """Families of kernels. The first seven are of ``attention``, the next of ``kv_append``, the last of
    ``attention_backward``; combine, scores, merge, dot and convert are further stages of plans.
    """

    FWD = "fwd"
    SPLITKV = "fwd_splitkv"
    COMBINE = "fwd_splitkv_combine"
    PAGEDKV = "fwd_pagedkv"
    BATCH_PREFILL = "batch_prefill"
    SCORES = "scores"
    MERGE = "fwd_merge"
    APPENDKV = "fwd_appendkv"
    DOT_DO_O = "bwd_dot_do_o"
    DQ_DK_DV = "bwd_dq_dk_dv"
    CONVERT_DQ = "bwd_convert_dq"


MAIN_FAMILIES = frozenset(
    {Family.FWD, Family.SPLITKV, Family.PAGEDKV, Family.BATCH_PREFILL, Family.APPENDKV, Family.DQ_DK_DV}
)
"""Families whose kernels compute a problem; the others only take part in plans."""

FAMILY_OPERATIONS: Mapping[Family, str] = {
    **dict.fromkeys(list(Family)[:7], ATTENTION),
    Family.APPENDKV: KV_APPEND,
    **dict.fromkeys(list(Family)[8:], ATTENTION_BACKWARD),
}

API_FAMILIES: Mapping[str, str] = {
    "fwd": ATTENTION,
    "fwd_splitkv": ATTENTION,
    "fwd_pagedkv": ATTENTION,
    "batch_prefill": ATTENTION,
    "fwd_appendkv": KV_APPEND,
    "bwd": ATTENTION_BACKWARD,
}
"""Families of Composable Kernel's calls, and the operations that they are."""

VARIANT_ALIASES: Mapping[str, str] = {
    **API_FAMILIES,
    **{family.value: operation for family, operation in FAMILY_OPERATIONS.items()},
    "fmha": ATTENTION,
    "forward": ATTENTION,
    "splitkv": ATTENTION,
    "pagedkv": ATTENTION,
    "backward": ATTENTION_BACKWARD,
    "fmha_bwd": ATTENTION_BACKWARD,
    "appendkv": KV_APPEND,
}
"""Other spellings of operations, and which they are."""


class FmhaDType(Word):
    """The element types of queries, of keys and values, and of the output, as one word.

    ``fp8fp16`` has all inputs in fp8 (E4M3) and the output in fp16; ``fp16fp8`` has queries and output in fp16, keys
    and values in fp8. Rules reject the last three, of which there are no kernels.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8FP16 = "fp8fp16"
    FP8BF16 = "fp8bf16"
    FP8FP32 = "fp8fp32"
    FP16FP8 = "fp16fp8"
    BF16FP8 = "bf16fp8"
    BF8 = "bf8"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"

    @property
    def q(self) -> DType:
        return DType(_PARTS[self.value][0])

    @property
    def kv(self) -> DType:
        return DType(_PARTS[self.value][1])

    @property
    def o(self) -> DType:
        return DType(_PARTS[self.value][2])

    @property
    def p(self) -> DType:
        """Element type of probabilities in the second product where the matrix unit asks for it."""
        return self.q

    @property
    def is_mixed(self) -> bool:
        """Only keys and values are fp8."""
        return self.q != self.kv

    @classmethod
    def of(cls, q: DType, kv: DType, o: DType) -> FmhaDType | None:
        """The word for three element types; None if there is none."""
        for word, parts in _PARTS.items():
            if parts == (q.value, kv.value, o.value) and word not in ("mxfp8", "mxfp4"):
                return cls(word)
        return None


_PARTS = {
    "fp32": ("fp32", "fp32", "fp32"),
    "fp16": ("fp16", "fp16", "fp16"),
    "bf16": ("bf16", "bf16", "bf16"),
    "fp8fp16": ("fp8", "fp8", "fp16"),
    "fp8bf16": ("fp8", "fp8", "bf16"),
    "fp8fp32": ("fp8", "fp8", "fp32"),
    "fp16fp8": ("fp16", "fp8", "fp16"),
    "bf16fp8": ("bf16", "fp8", "bf16"),
    "bf8": ("bf8", "bf8", "fp16"),
    "mxfp8": ("fp8", "fp8", "fp32"),
    "mxfp4": ("fp8", "fp8", "fp32"),
}

DTYPE_ALIASES: Mapping[str, str] = {"fp8": "fp8fp16", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class Mode(Word):
    """``batch``: items of one size. ``group``: sequences of different lengths end to end (varlen)."""

    BATCH = "batch"
    GROUP = "group"


class VLayout(Word):
    """``vr``: elements of a value are neighbours. ``vc``: the same element of neighbouring values are."""

    VR = "vr"
    VC = "vc"


class MaskKind(Word):
    """Kinds of masks that kernels implement. The start of the diagonal is a number, not a kind."""

    NONE = "no"
    CAUSAL = "causal"
    WINDOW = "window"


class MaskWord(Word):
    """Masks as callers name them."""

    NONE = "no"
    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"
    GENERIC = "generic"


MASK_ALIASES: Mapping[str, str] = {
    "no_mask": "no",
    "0": "no",
    "mask_top_left": "top_left",
    "causal": "top_left",
    "t": "top_left",
    "1": "top_left",
    "mask_bottom_right": "bottom_right",
    "b": "bottom_right",
    "2": "bottom_right",
    "window_generic": "generic",
    "g": "generic",
    "3": "generic",
}


class BiasKind(Word):
    NONE = "no"
    ELEMENTWISE = "elementwise"
    ALIBI = "alibi"


class Scores(Word):
    """Stages of the scores that may be an output: after the factor, after the soft cap, with bias and mask, and after
    the softmax.
    """

    NONE = "no"
    SCALED = "scaled"
    CAPPED = "softcap"
    MASKED = "masked"
    PROBABILITIES = "probabilities"


class QScale(Word):
    """Factors of fp8 operands: nothing, one number for a tensor or head, one for a block of rows, or one
    for a page.
    """

    NONE = "no"
    PERTENSOR = "pertensor"
    BLOCKSCALE = "blockscale"
    KV_BLOCKSCALE = "kv_blockscale"


class Rope(Word):
    """Which elements are rotated together: neighbours, or the two halves."""

    NONE = "none"
    INTERLEAVED = "interleaved"
    HALF = "half"


ROPE_ALIASES: Mapping[str, str] = {"inter": "interleaved", "half_rotated": "half", "no": "none"}


class KvLayout(Word):
    """``linear``: pages [page, head, element]. ``vectorized``: sixteen bytes of a head's elements (of V: of a page's
    tokens) lie together, page [head, element/x, page, x].
    """

    LINEAR = "linear"
    VECTORIZED = "vectorized"


class KvLookup(Word):
    """``vllm``: a table [sequence, page]. ``sglang``: all sequences' pages end to end, and where each begins."""

    VLLM = "vllm"
    SGLANG = "sglang"


class SmallType(Word):
    """Element type of a small operand; ``as_q``: that of the queries."""

    AS_Q = "as_q"
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Scheduling(Word):
    """How the consumers of a warp-specialised kernel share the matrix unit."""

    DEFAULT = "default"
    COOPERATIVE = "cooperative"
    PINGPONG = "pingpong"


def vector_width(dtype: DType) -> int:
    """Elements that lie together in the vectorized layout of a cache: sixteen bytes."""
    return 16 // dtype.bytes

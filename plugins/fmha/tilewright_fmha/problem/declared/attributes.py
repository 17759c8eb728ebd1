"""Attributes of the three operations: names, bounds, choices and defaults, from which requests are read."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_fmha.vocabulary import (
    ATTENTION,
    ATTENTION_BACKWARD,
    KV_APPEND,
    MASK_ALIASES,
    ROPE_ALIASES,
    KvLayout,
    KvLookup,
    MaskWord,
    QScale,
    Rope,
    Scores,
)
from tilewright_kit.contract.declaration import AttributeSpec, choices_of
from tilewright_kit.requests.attributes import ALIGNMENT, element_type, flag, integer, number, word

__all__ = ["ATTRIBUTES", "MAX_PAGE_SIZE", "MOST"]

MAX_SPLITS = 1024
MAX_PAGE_SIZE = 1024
MOST = 2**31 - 1
"""Lengths and places of sequences are int32 tensors."""

LEAST = 1e-30
"""Bounds of a factor of scores: products with scores are normal numbers of fp32."""
_IN_SIZE = f"From {LEAST:g} to {1 / LEAST:g} in size."

SCALE = number("scale", "Factor of the scores.", None, absent="1 / sqrt(D)", constraint=_IN_SIZE)
CAUSAL = flag("causal", "Query i sees no key behind i, counted from where `mask_align` says.")
MASK = word(
    "mask",
    "Mask of the scores: none, a triangle that begins at a corner, or a window.",
    choices_of(MaskWord),
    aliases=MASK_ALIASES,
    absent="as `causal` and the windows say",
    constraint="`generic` takes its window from `window_left` and `window_right`.",
)
_SEEN = "keys"
_ALL = "-1: all of them."
WINDOW_LEFT = integer(
    "window_left", "Keys that a query sees before the diagonal.", -1, -1, MOST, unit=_SEEN, constraint=_ALL
)
WINDOW_RIGHT = integer(
    "window_right", "Keys that a query sees behind the diagonal.", None, -1, MOST, unit=_SEEN, constraint=_ALL,
    absent="0 for `causal`, `top_left` and `bottom_right`, else -1",
)  # fmt: skip
MASK_ALIGN = word(
    "mask_align",
    "Corner at which the diagonal begins.",
    (MaskWord.TOP_LEFT.value, MaskWord.BOTTOM_RIGHT.value),
    aliases={name: value for name, value in MASK_ALIASES.items() if value in ("top_left", "bottom_right")},
    absent="that of `mask`, else `top_left`",
)
SINK_SIZE = integer(
    "sink_size", "First keys that a window never hides.", 0, 0, MOST, unit=_SEEN,
    constraint="Without effect where `window_left` is -1.",
)  # fmt: skip
SOFTCAP = number(
    "softcap", "Bound of the scores: softcap * tanh(score / softcap).", None, absent="no bound",
    constraint=f"Above 0. {_IN_SIZE}",
)  # fmt: skip
DROPOUT_P = number(
    "dropout_p", "Probability with which a weight is dropped, in steps of 1/256.", 0.0, lowest=0, highest=1,
    constraint="Below 1.",
)  # fmt: skip
SEED = integer(
    "seed",
    "Key of the random numbers.",
    0,
    0,
    2**63 - 1,
    constraint="Not beside the operand `rng`.",
)
OFFSET = integer("offset", "Offset in the random numbers.", 0, 0, 2**32 - 1, constraint="As `seed`.")
MAX_SEQLEN_Q = integer(
    "max_seqlen_q", "Most rows of queries that a sequence has.", None, 1, MOST, unit="rows",
    absent="all, where items have one size", constraint="With `cu_seqlens_q`, where it is needed, and only there.",
)  # fmt: skip
MAX_SEQLEN_K = integer(
    "max_seqlen_k", "Most keys that a sequence has.", None, 1, MOST, unit=_SEEN,
    absent="the room of the cache, or all where items have one size",
    constraint="Needed with `cu_seqlens_k`; also of caches.",
)  # fmt: skip
MAX_PREFIX_ROWS = integer(
    "max_prefix_rows", "Most rows of queries of a group whose sequences share a prefix.", None, 1, MOST, unit="rows",
    absent="all rows", constraint="With `prefix_starts` only.",
)  # fmt: skip
PAGE_SIZE = integer(
    "page_size", "Tokens of a page.", None, 1, MAX_PAGE_SIZE, unit="tokens", absent="by the shape of the cache",
    constraint="A power of two, and the shape's. With `block_table` only.",
)  # fmt: skip
KV_LAYOUT = word(
    "kv_layout", "Order of a page.", choices_of(KvLayout), absent="`linear`", constraint="With `block_table` only.",
)  # fmt: skip
KV_LOOKUP = word(
    "kv_lookup", "Form of `block_table`: a table, or one list that `page_starts` divides.", choices_of(KvLookup),
    absent="`sglang` with `page_starts`, else `vllm`", constraint="With `block_table` only.",
)  # fmt: skip
RETURN_LSE = flag("return_lse", "Compute the output `lse`.")
RETURN_RANDVAL = flag(
    "return_randval", "Return the random bytes as the output `randval`.", constraint="With `dropout_p`."
)
RETURN_SCORES = word(
    "return_scores",
    "Stage of the scores to return as the output `scores`: after `scale`, after `softcap`, with bias and mask (-inf "
    "where nothing is seen), or the probabilities before dropout.",
    tuple(item.value for item in Scores if item is not Scores.NONE),
    absent="none",
    constraint="Not for keys in pages, nor for fp8.",
)
RETURN_STATUS = flag("return_status", "Return what kernels found wrong with lengths and tables as the output `status`.")
RETURN_DBIAS = flag("return_dbias", "Compute the output `dbias`.", constraint="With `bias`.")
QSCALE = word(
    "qscale", "Form of the factors of fp8 operands.", choices_of(QScale), aliases={"no_scale": "no"},
    absent="by the shapes of the factors", constraint="fp8 operands only; `kv_blockscale` for pages only.",
)  # fmt: skip
SCALE_BLOCK_Q = integer(
    "scale_block_q", "Rows of queries with one factor, for `blockscale`.", 128, 1, MOST, unit="rows"
)
SCALE_BLOCK_K = integer("scale_block_k", "Keys with one factor, for `blockscale`.", 128, 1, MOST, unit=_SEEN)
HEAD_DIM_V = integer(
    "head_dim_v", "Elements of values, which are the first ones of each key (a latent cache).", 0, 0, 1024,
    unit="elements", absent="as `v` has", constraint="Without `v`, and then needed; not above D.",
)  # fmt: skip
NUM_SPLITS = integer(
    "num_splits", "Parts that the keys are divided into, which are computed apart.", 0, 0, MAX_SPLITS,
    constraint="0: the planner decides.",
)  # fmt: skip
MIN_SEQLEN_Q = integer(
    "min_seqlen_q", "Sequences of fewer queries are skipped: their rows of the output are zeros.", 0, 0, MOST,
    unit="rows",
)  # fmt: skip
DETERMINISTIC = flag("deterministic", "Equal calls give equal bits.", True)
ROPE = word(
    "rope", "Elements that are rotated together: neighbours, or the two halves.", choices_of(Rope),
    aliases=ROPE_ALIASES, absent="`interleaved` with `rotary_cos` and `rotary_sin`, else `none`",
)  # fmt: skip
ROTARY_DIM = integer(
    "rotary_dim", "Elements of a head that are rotated.", 0, 0, MOST, unit="elements",
    constraint="0: as many as the tables have; else equal to that.",
)  # fmt: skip
OUT_DTYPE = element_type(
    "out_dtype", "Element type of `o`.", absent="that of the described output, else that of `q` (fp16 for fp8)",
    constraint="Equal to that of the output where it is described.",
)  # fmt: skip

_MASKED = (SCALE, CAUSAL, MASK, WINDOW_LEFT, WINDOW_RIGHT, MASK_ALIGN, SINK_SIZE, SOFTCAP)
_DROPPED = (DROPOUT_P, SEED, OFFSET)
_LENGTHS = (MAX_SEQLEN_Q, MAX_SEQLEN_K, ALIGNMENT)
_PAGES = (PAGE_SIZE, KV_LAYOUT, KV_LOOKUP)
ATTRIBUTES: Mapping[str, tuple[AttributeSpec, ...]] = {
    ATTENTION: (
        *_MASKED, *_DROPPED, *_LENGTHS, MAX_PREFIX_ROWS, *_PAGES, RETURN_LSE, RETURN_RANDVAL, RETURN_SCORES,
        RETURN_STATUS, QSCALE, SCALE_BLOCK_Q, SCALE_BLOCK_K, HEAD_DIM_V, NUM_SPLITS, MIN_SEQLEN_Q, OUT_DTYPE,
    ),
    ATTENTION_BACKWARD: (*_MASKED, *_DROPPED, *_LENGTHS, RETURN_RANDVAL, RETURN_DBIAS, DETERMINISTIC),
    KV_APPEND: (*_LENGTHS, *_PAGES, ROPE, ROTARY_DIM, RETURN_STATUS),
}  # fmt: skip
"""Attributes of each operation."""

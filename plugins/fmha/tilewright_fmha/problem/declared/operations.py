"""Declarations of the three operations: operands, attributes and examples."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_fmha.problem.declared.attributes import ATTRIBUTES
from tilewright_fmha.problem.declared.operands import OPERANDS
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND
from tilewright_kit.contract.declaration import Declaration, Example
from tilewright_kit.contract.problem import Attribute, OperationRequest
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["DECLARATIONS"]

_LETTERS = (
    "B items or sequences, H heads, S rows of queries or keys, D elements of a head, x elements of sixteen bytes. Key "
    "heads divide query heads: query head h reads key head h // (H of q / H of k)."
)
_COMPUTED = (
    "s = softcap * tanh(scale * (q . k) / softcap) + bias - slope * |i + off - j|; o = dropout(softmax(s where "
    "visible)) * v. Query i sees key j if i + off - window_left <= j <= i + off + window_right (or j < sink_size); off "
    "is 0 from the top left and (keys - queries) from the bottom right."
)


def _of(shape: tuple[int, ...], dtype: str = "fp32") -> TensorDesc:
    return TensorDesc.of(dtype, shape)


def _example(title: str, operation: str, inputs: dict[str, TensorDesc], **attributes: Attribute) -> Example:
    return Example(title, OperationRequest(operation, inputs, {}, attributes))


def _declaration(operation: str, summary: str, notes: tuple[str, ...], *examples: Example) -> Declaration:
    return Declaration(summary, OPERANDS[operation], ATTRIBUTES[operation], examples, notes)


_Q, _K = _of((2, 8, 100, 64)), _of((2, 2, 120, 64))
_PAGED = _of((32, 16, 2, 64))
_TABLE, _LENGTHS = _of((2, 8), "int32"), _of((2,), "int32")
DECLARATIONS: Mapping[str, Declaration] = {
    ATTENTION: _declaration(
        ATTENTION,
        "Fused attention over keys and values of one size, sequences end to end, or pages.",
        (_COMPUTED, _LETTERS),
        _example("Eight heads of queries over two of keys, causal", ATTENTION,
                 {"q": _Q, "k": _K, "v": _K}, mask="top_left"),
        _example("Sequences end to end, causal from the bottom right", ATTENTION,
                 {"q": _of((100, 8, 64)), "k": _of((100, 2, 64)), "v": _of((100, 2, 64)),
                  "cu_seqlens_q": _of((4,), "int32"), "cu_seqlens_k": _of((4,), "int32")},
                 max_seqlen_q=70, max_seqlen_k=70, mask="bottom_right"),
        _example("One token of each of two sequences over a cache in pages", ATTENTION,
                 {"q": _of((2, 8, 1, 64)), "k": _PAGED, "v": _PAGED, "block_table": _TABLE, "seqlens_k": _LENGTHS}),
        _example("One token of each of two sequences that share a prefix of up to 4 pages", ATTENTION,
                 {"q": _of((2, 8, 1, 64)), "k": _PAGED, "v": _PAGED, "block_table": _TABLE, "seqlens_k": _LENGTHS,
                  "prefix_table": _of((1, 4), "int32"), "prefix_seqlens": _of((1,), "int32")}),
        _example("Three sequences in two groups that share prefixes", ATTENTION,
                 {"q": _of((3, 8, 1, 64)), "k": _PAGED, "v": _PAGED, "block_table": _of((3, 8), "int32"),
                  "seqlens_k": _of((3,), "int32"), "prefix_table": _of((2, 4), "int32"),
                  "prefix_seqlens": _LENGTHS, "prefix_starts": _of((3,), "int32")}, max_prefix_rows=2),
        _example("Items of true lengths, each over an item of a cache", ATTENTION,
                 {"q": _Q, "k": _of((4, 2, 120, 64)), "v": _of((4, 2, 120, 64)), "seqlens_q": _LENGTHS,
                  "seqlens_k": _LENGTHS, "cache_index": _LENGTHS}),
        _example("A window with a soft cap, dropout, and what gradients need", ATTENTION,
                 {"q": _Q, "k": _K, "v": _K, "rng": _of((4,), "int32")},
                 mask="generic", window_left=32, window_right=0, softcap=30.0, dropout_p=0.1, return_lse=True),
    ),
    ATTENTION_BACKWARD: _declaration(
        ATTENTION_BACKWARD,
        "Gradients of attention, from what the forward pass gave as `o` and `lse`.",
        (_COMPUTED, _LETTERS),
        _example("Gradients of a causal pass", ATTENTION_BACKWARD,
                 {"q": _Q, "k": _K, "v": _K, "o": _Q, "lse": _of((2, 8, 100)), "do": _Q}, mask="top_left"),
        _example("With a bias, its gradient, and true lengths", ATTENTION_BACKWARD,
                 {"q": _Q, "k": _K, "v": _K, "o": _Q, "lse": _of((2, 8, 100)), "do": _Q, "seqlens_q": _LENGTHS,
                  "seqlens_k": _LENGTHS, "bias": _of((1, 8, 100, 120))}, return_dbias=True),
        _example("Sequences end to end, with ALiBi, learned sinks and dropout", ATTENTION_BACKWARD,
                 {"q": _of((100, 8, 64)), "k": _of((100, 2, 64)), "v": _of((100, 2, 64)), "o": _of((100, 8, 64)),
                  "lse": _of((8, 100)), "do": _of((100, 8, 64)), "cu_seqlens_q": _of((4,), "int32"),
                  "cu_seqlens_k": _of((4,), "int32"), "alibi_slopes": _of((8,)), "sinks": _of((8,)),
                  "rng": _of((4,), "int32")},
                 max_seqlen_q=70, max_seqlen_k=70, mask="bottom_right", dropout_p=0.1),
    ),
    KV_APPEND: _declaration(
        KV_APPEND,
        "New rows behind those of a cache of keys and values, in place, with rotation of keys and queries.",
        (_LETTERS,),
        _example("One token of each of two sequences into a cache in pages", KV_APPEND,
                 {"k_new": _of((2, 2, 1, 64)), "v_new": _of((2, 2, 1, 64)), "k_past": _PAGED, "v_past": _PAGED,
                  "seqlens_k": _LENGTHS, "block_table": _TABLE}),
        _example("Several rows of each of two sequences, into pages that one list names", KV_APPEND,
                 {"k_new": _of((10, 2, 64)), "v_new": _of((10, 2, 64)), "k_past": _PAGED, "v_past": _PAGED,
                  "seqlens_k": _LENGTHS, "cu_seqlens_q": _of((3,), "int32"), "block_table": _of((12,), "int32"),
                  "page_starts": _of((3,), "int32")}, max_seqlen_q=7),
        _example("bf16 rows of two sequences into a cache of fp8, with a factor for each head", KV_APPEND,
                 {"k_new": _of((2, 2, 1, 64), "bf16"), "v_new": _of((2, 2, 1, 64), "bf16"),
                  "k_past": _of((2, 2, 256, 64), "fp8"), "v_past": _of((2, 2, 256, 64), "fp8"),
                  "seqlens_k": _LENGTHS, "k_descale": _of((2,)), "v_descale": _of((2,))}),
        _example("With rotation, into a cache of items", KV_APPEND,
                 {"k_new": _of((2, 2, 1, 64)), "v_new": _of((2, 2, 1, 64)), "k_past": _of((2, 2, 256, 64)),
                  "v_past": _of((2, 2, 256, 64)), "seqlens_k": _LENGTHS, "q": _of((2, 8, 1, 64)),
                  "rotary_cos": _of((256, 32)), "rotary_sin": _of((256, 32))},
                 rope="half"),
    ),
}  # fmt: skip

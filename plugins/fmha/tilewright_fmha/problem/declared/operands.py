"""Operands of the three operations: names, forms and element types, in binding order."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND
from tilewright_kit.contract.declaration import OperandSpec
from tilewright_kit.contract.problem import Role
from tilewright_kit.types.dtypes import DType

__all__ = ["OPERANDS", "form_of"]

_FLOATS = (DType.FP32, DType.FP16, DType.BF16)
_TYPES = (*_FLOATS, DType.FP8)
_FP32, _INT32 = (DType.FP32,), (DType.INT32,)
_ROWS = ("[B, H, S, D]", "[rows of all sequences, H, D]")
_PAGES = ("[pages, page size, H, D]", "[pages, H, D/x, page size, x]")
_V_PAGES = ("[pages, page size, H, D]", "[pages, H, page size/x, D, x]")
_STRIDED = "Any strides."
_TABLE = "Without gaps."


def _input(
    name: str, summary: str, shapes: tuple[str, ...], ranks: tuple[int, int], dtypes: tuple[DType, ...], rule: str = ""
) -> OperandSpec:
    return OperandSpec(name, Role.INPUT, summary, shapes, ranks, dtypes, constraint=rule)


def _option(
    name: str, summary: str, shapes: tuple[str, ...], ranks: tuple[int, int], dtypes: tuple[DType, ...], rule: str = ""
) -> OperandSpec:
    return OperandSpec(name, Role.INPUT, summary, shapes, ranks, dtypes, True, constraint=rule)


def _output(
    name: str, summary: str, shapes: tuple[str, ...], ranks: tuple[int, int], dtypes: tuple[DType, ...], rule: str = "",
    *, asked: bool = True,
) -> OperandSpec:  # fmt: skip
    """``asked``: computed where an attribute or the caller's description asks for it."""
    return OperandSpec(name, Role.OUTPUT, summary, shapes, ranks, dtypes, asked, constraint=rule)


_STARTS = "First row of each sequence, and the end of the last: sequences lie end to end."
_STARTS_Q = _option("cu_seqlens_q", _STARTS, ("[B + 1]",), (1, 1), _INT32, _TABLE)
_LENGTHS = (
    _STARTS_Q,
    _option("cu_seqlens_k", _STARTS, ("[B + 1]",), (1, 1), _INT32, f"With `cu_seqlens_q`. {_TABLE}"),
    _option("seqlens_q", "True number of queries of each sequence.", ("[B]",), (1, 1), _INT32, _TABLE),
    _option(
        "seqlens_k", "True number of keys of each sequence.", ("[B]",), (1, 1), _INT32, f"Needed with pages. {_TABLE}"
    ),
)
_TABLES = (
    _option(
        "block_table", "Pages of each sequence, in order; or of all sequences, end to end.", ("[B, n]", "[pages]"),
        (1, 2), _INT32, "Numbers of a row are neighbours.",
    ),
    _option("page_starts", "Where each sequence begins in a list of pages, and the end of the last.", ("[B + 1]",),
            (1, 1), _INT32, f"With a `block_table` of one dimension. {_TABLE}"),
    _option("cache_index", "Item of the keys and values of each item of the queries.", ("[B]",), (1, 1), _INT32,
            f"Neither with pages nor with sequences end to end. {_TABLE}"),
)  # fmt: skip
_PREFIXES = (
    _option("prefix_table", "Pages of the prefix of each group of sequences, in order.", ("[groups, n]",), (2, 2),
            _INT32, "With `block_table`, which has the pages behind the prefix. Numbers of a row are neighbours."),
    _option("prefix_seqlens", "Keys of each prefix.", ("[groups]",), (1, 1), _INT32, f"With `prefix_table`. {_TABLE}"),
    _option("prefix_starts", "First row of queries of each group, among those of all sequences, and the end of the "
            "last; left out, groups have equally many.", ("[groups + 1]",), (1, 1), _INT32,
            f"With `prefix_table`. {_TABLE}"),
)  # fmt: skip
_SCORES = (
    _option("bias", "Added to the scores.", ("[B, H, S, Sk]",), (4, 4), _FLOATS,
            "Each size is that of the scores or 1. fp32, or of the type of `q`."),
    _option("alibi_slopes", "Slopes by which scores fall with the distance of query and key.", ("[H]", "[B, H]"),
            (1, 2), _FP32, _TABLE),
    _option("sinks", "Learned logits, which take part in the sums of rows alone.", ("[H]",), (1, 1), _FP32, _TABLE),
    _option("rng", "Low and high 32 bits of the seed, offset, 0.", ("[4]",), (1, 1), _INT32,
            f"With `dropout_p`; instead of `seed` and `offset`. {_TABLE}"),
)  # fmt: skip
_SCALES = tuple(
    _option(
        f"{name}_descale", f"Factors of `{name}` in fp8.",
        ("[]", "[H]", "[B, H]", "[B, H, blocks]", *(("[pages, H]",) if name != "q" else ())), (0, 3), _FP32,
        f"`{name}` is fp8; `qscale` tells forms that are alike.",
    )
    for name in "qkv"
)  # fmt: skip
_Q = _input(
    "q", "Queries.", _ROWS, (3, 4), _TYPES,
    "D is from 1 to 1024; above 256 GPUs have forward passes only. Three dimensions with "
    f"`cu_seqlens_q`. {_STRIDED}",
)  # fmt: skip
_SAME = "A number of heads that divides that of `q`. "
_LSE = ("[B, H, S]", "[H, rows]")
_RANDVAL = _output("randval", "Random bytes that weights were dropped by.", ("[B, H, S, Sk]", "[H, rows, Sk]"), (3, 4),
                   (DType.INT8,), "With `dropout_p`. The bytes are unsigned.")  # fmt: skip
_STATUS = _output("status", "What kernels found wrong: bits, the first sequence concerned, its length or page, 0.",
                  ("[4]",), (1, 1), _INT32, _TABLE)  # fmt: skip

OPERANDS: Mapping[str, tuple[OperandSpec, ...]] = {
    ATTENTION: (
        _Q,
        _input("k", "Keys.", (*_ROWS, *_PAGES), (3, 5), _TYPES, f"{_SAME}Of the type of `q`, or fp8. {_STRIDED}"),
        _option("v", "Values; left out, they are the first elements of keys.", (*_ROWS, *_V_PAGES), (3, 5), _TYPES,
                f"As `k`, of which only the last size may differ. Needed but with `head_dim_v`. {_STRIDED}"),
        *_LENGTHS,
        *_TABLES,
        *_PREFIXES,
        *_SCORES,
        *_SCALES,
        _output("o", "Result.", _ROWS, (3, 4), _FLOATS,
                "The shape of `q` with the last size of `v`. Of the type of `q`; for fp8 one of these.", asked=False),
        _output("lse", "Natural logarithms of the rows' sums.", _LSE, (2, 3), _FP32, _STRIDED),
        _RANDVAL,
        _output("scores", "Scores or probabilities, as `return_scores` says.", ("[B, H, S, Sk]", "[H, rows, Sk]"),
                (3, 4), _FP32, _STRIDED),
        _STATUS,
    ),
    ATTENTION_BACKWARD: (
        OperandSpec(_Q.name, _Q.role, _Q.summary, _Q.shapes, _Q.ranks, _FLOATS, constraint=_Q.constraint),
        _input("k", "Keys.", _ROWS, (3, 4), _FLOATS, f"{_SAME}Of the type of `q`. {_STRIDED}"),
        _input("v", "Values.", _ROWS, (3, 4), _FLOATS, f"As `k`, of which only the last size may differ. {_STRIDED}"),
        _input("o", "Output of the forward pass, as it was stored.", _ROWS, (3, 4), _FLOATS, _STRIDED),
        _input("lse", "What the forward pass gave as `lse`.", _LSE, (2, 3), _FP32, _STRIDED),
        _input("do", "Gradient of `o`, in its shape.", _ROWS, (3, 4), _FLOATS, f"Of the type of `o`. {_STRIDED}"),
        *_LENGTHS,
        *_SCORES,
        *(
            _output(f"d{name}", f"Gradient of `{name}`.", _ROWS, (3, 4), _FLOATS, f"As `{name}`.", asked=False)
            for name in "qkv"
        ),
        _output("dbias", "Gradient of `bias`.", ("[B, H, S, Sk]",), (4, 4), _FLOATS, "As `bias`."),
        _output("dsinks", "Gradient of `sinks`.", ("[H]",), (1, 1), _FP32, f"Computed with `sinks`. {_TABLE}"),
        _RANDVAL,
    ),
    KV_APPEND: (
        _input("k_new", "New keys.", _ROWS, (3, 4), _TYPES,
               f"Of the type of the cache; fp16 or bf16, which are rounded, for one in fp8. {_STRIDED}"),
        _input("v_new", "New values.", _ROWS, (3, 4), _TYPES, f"Of the type of `k_new`. {_STRIDED}"),
        _input("k_past", "Cache of keys as it is.", ("[items, H, room, D]", *_PAGES), (4, 5), _TYPES, _STRIDED),
        _input("v_past", "Cache of values as it is.", ("[items, H, room, D]", *_V_PAGES), (4, 5), _TYPES, _STRIDED),
        _input("seqlens_k", "Length of each sequence before the new rows.", ("[B]",), (1, 1), _INT32, _TABLE),
        _STARTS_Q,
        *_TABLES,
        _option("rotary_cos", "Cosines by position.", ("[positions, rotary_dim / 2]",), (2, 2), _FLOATS,
                "With `rotary_sin`, in equal form. fp32, or of the type of `q`."),
        _option("rotary_sin", "Sines by position.", ("[positions, rotary_dim / 2]",), (2, 2), _FLOATS,
                "With `rotary_cos`, in equal form."),
        _option("q", "Queries that are rotated by the positions of the new rows.", _ROWS, (3, 4), _TYPES,
                "The rows of `k_new`. With the rotary tables only."),
        *(
            _option(f"{name}_descale", f"Factors that rows of `{name}_new` are divided by.", ("[]", "[H]", "[B, H]"),
                    (0, 2), _FP32, f"`{name}_new` is fp16 or bf16, and the cache fp8. Attention takes the same.")
            for name in "kv"
        ),
        _output("k_cache", "Cache of keys with the new rows.", ("[items, H, room, D]", *_PAGES), (4, 5), _TYPES,
                "As `k_past`, whose very memory it is as a rule.", asked=False),
        _output("v_cache", "Cache of values with the new rows.", ("[items, H, room, D]", *_V_PAGES), (4, 5), _TYPES,
                "As `v_past`, whose very memory it is as a rule.", asked=False),
        _output("q_out", "Rotated queries.", _ROWS, (3, 4), _TYPES, "Computed where `q` is given."),
        _output("seqlens_out", "Length of each sequence with the new rows.", ("[B]",), (1, 1), _INT32,
                f"May be the memory of `seqlens_k`. {_TABLE}"),
        _STATUS,
    ),
}  # fmt: skip


def form_of(operation: str, name: str) -> str:
    """An operand as a phrase: ``the queries [B, H, S, D]``."""
    found = next(item for item in OPERANDS[operation] if item.name == name)
    summary = found.summary.rstrip(".")
    return f"{name}, the {summary[0].lower()}{summary[1:]}, {found.shapes[0]}"

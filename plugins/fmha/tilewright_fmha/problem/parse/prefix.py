"""Prefixes that sequences share (FlashInfer's cascade): a problem of two parts, over the prefix of a group and over the
keys of each sequence, whose results are put together by the logarithms of their sums.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tilewright_fmha.problem.declared.attributes import MAX_PREFIX_ROWS
from tilewright_fmha.problem.operands import NAMES
from tilewright_fmha.problem.problem import AttentionProblem, SharedPrefix
from tilewright_fmha.problem.shapes import rank
from tilewright_fmha.vocabulary import ATTENTION, BiasKind, QScale, Scores
from tilewright_kit.contract.problem import Operand, OperationRequest, Role
from tilewright_kit.requests.attributes import check_tensor, refuse, take_int
from tilewright_kit.types.errors import TilewrightError
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["PREFIX_OPERANDS", "has_prefix", "of_prefix", "parse_prefixed"]

PREFIX_OPERANDS: Mapping[str, str] = {
    "prefix_table": "block_table",
    "prefix_seqlens": "seqlens_k",
    "prefix_starts": "cu_seqlens_q",
}
"""Operands of prefixes, and what they are in the part over prefixes."""
_ROWS = MAX_PREFIX_ROWS.name
_WORDS = {own: name for name, own in PREFIX_OPERANDS.items()} | {"max_seqlen_q": _ROWS}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b")

Parse = Callable[[OperationRequest], AttentionProblem]


def has_prefix(request: OperationRequest) -> bool:
    """True for requests with anything that is about prefixes."""
    return _ROWS in request.attributes or any(name in request.inputs for name in PREFIX_OPERANDS)


@contextmanager
def of_prefix() -> Iterator[None]:
    """Errors of the part over prefixes name the operands that the caller knows."""
    try:
        yield
    except TilewrightError as error:
        reason, field, fix = (_WORD.sub(_word, text) for text in (error.reason, error.field, error.fix))
        reason = reason.replace("sequence ", "prefix ", 1)
        raise type(error)(reason, field=field, value=error.value, rule=error.rule, fix=fix) from None


def _word(found: re.Match[str]) -> str:
    return _WORDS[found[1]]


def parse_prefixed(request: OperationRequest, parse: Parse) -> AttentionProblem:
    """The problem of a request with prefixes. ``parse`` reads one without. Raises ``InvalidArgumentError``."""
    _check_operands(request)
    inputs = {name: desc for name, desc in request.inputs.items() if name not in PREFIX_OPERANDS}
    words = {name: value for name, value in request.attributes.items() if name != _ROWS}
    asked = parse(OperationRequest(request.operation, inputs, request.outputs, words))
    _check_features(asked)
    summed = {**words, "return_lse": True}
    rest = asked if asked.lse else parse(OperationRequest(request.operation, inputs, request.outputs, summed))
    with of_prefix():
        prefix = parse(_request(request, asked))
    own = [Operand(name, request.inputs[name], Role.INPUT) for name in PREFIX_OPERANDS if name in request.inputs]
    names = NAMES[ATTENTION]
    order = {name: at for at, name in enumerate((*names.required, *names.optional, *names.outputs))}
    tensors = sorted((*asked.tensors, *own), key=lambda operand: order[operand.name])
    return replace(asked, tensors=tuple(tensors), shared=SharedPrefix(prefix, rest))


def _check_operands(request: OperationRequest) -> None:
    if _ROWS in request.attributes:
        take_int(request.attributes, MAX_PREFIX_ROWS)
        if "prefix_starts" not in request.inputs:
            raise refuse(
                f"{_ROWS} is for groups of different sizes",
                f"attributes.{_ROWS}",
                request.attributes[_ROWS],
                "prefix_operands",
                f"leave {_ROWS} out, or give prefix_starts: where each group's rows of queries begin, [groups + 1]",
            )
    for name in PREFIX_OPERANDS:
        if name in request.inputs:
            check_tensor(name, request.inputs[name])
    missing = next((name for name in ("prefix_table", "prefix_seqlens") if name not in request.inputs), "")
    if missing:
        raise refuse(
            f"prefixes that sequences share need {missing}",
            missing,
            "",
            "prefix_operands",
            "give prefix_table, the pages of each group's prefix, int32 [groups, pages], and prefix_seqlens, how many "
            "tokens it has, int32 [groups]; or nothing that is about prefixes",
        )
    rank("prefix_table", request.inputs["prefix_table"], 2, "the pages of each group's prefix, int32 [groups, pages]")
    if "block_table" not in request.inputs:
        raise refuse(
            "prefixes lie in pages, and keys here do not",
            "prefix_table",
            request.inputs["prefix_table"].shape,
            "prefix_paged",
            "give keys and values in pages, with block_table and seqlens_k for what follows the prefix",
        )
    starts, groups = request.inputs.get("prefix_starts"), request.inputs["prefix_table"].shape[0]
    if starts is not None and starts.shape != (groups + 1,):
        raise refuse(
            f"prefix_starts has shape {list(starts.shape)}, and prefix_table has {groups} groups",
            "prefix_starts.shape",
            starts.shape,
            "batch_agrees",
            f"give {groups + 1} numbers: the first row of each group, and the end of the last",
        )


def _check_features(problem: AttentionProblem) -> None:
    """All queries of a group see all of its prefix, and scores there are made as those of any other key."""
    factors = [name for name in ("q_descale", "k_descale", "v_descale") if _by_item(problem, name)]
    for wrong, field, value, why in (
        (problem.mask.left >= 0, "attributes.window_left", problem.mask.left, "a window would hide a prefix"),
        (problem.bias is BiasKind.ELEMENTWISE, "bias", "", "a bias has no columns for a prefix"),
        (problem.has("alibi_slopes"), "alibi_slopes", "", "slopes would need distances to the keys of a prefix"),
        (problem.has_dropout, "attributes.dropout_p", problem.drop_probability, "random bytes are those of one launch"),
        (problem.scores is not Scores.NONE, "attributes.return_scores", str(problem.scores), "scores have no columns "
         "for a prefix"),
        (bool(factors), factors[0] if factors else "", "", "a factor of each sequence is none of a prefix"),
    ):  # fmt: skip
        if wrong:
            raise refuse(
                f"{why}, which sequences share",
                field,
                value,
                "prefix_features",
                f"leave {field.removeprefix('attributes.')} out"
                + (" (factors are one number, one for each head, or one for each page and head)" if factors else "")
                + ", or give each sequence all of its pages in block_table",
            )


def _by_item(problem: AttentionProblem, name: str) -> bool:
    """True for factors that differ between sequences, or between blocks of their rows."""
    if not problem.has(name) or problem.scaling is None:
        return False
    if problem.scaling.kind is QScale.KV_BLOCKSCALE:
        return name == "q_descale" and len(problem.operand(name).desc.shape) > 1
    return len(problem.operand(name).desc.shape) > 1


def _request(request: OperationRequest, problem: AttentionProblem) -> OperationRequest:
    """The part over prefixes: one item for each group, with all of its rows of queries."""
    rows, heads, total = _rows(request.inputs["q"], problem), problem.heads_q, problem.total_q
    table = request.inputs["prefix_table"]
    inputs = {name: request.inputs[name] for name in ("k", "v") if name in request.inputs}
    inputs |= {name: desc for name, desc in request.inputs.items() if name.endswith("_descale")}
    inputs |= {own: request.inputs[name] for name, own in PREFIX_OPERANDS.items() if name in request.inputs}
    words: dict[str, Any] = {"scale": problem.scale, "return_lse": True, "return_status": problem.status}
    words |= {"out_dtype": problem.dtype.o.value, "alignment": problem.alignment}
    words |= {name: request.attributes[name] for name in ("kv_layout", "head_dim_v") if name in request.attributes}
    if problem.softcap:
        words["softcap"] = problem.softcap
    if problem.scaling is not None:
        words["qscale"] = problem.qscale.value
    o = TensorDesc.of(problem.dtype.o, (total, heads, problem.hdim_v))
    lse = TensorDesc.of("fp32", (heads, total))
    if "prefix_starts" in request.inputs:
        words["max_seqlen_q"] = request.attributes.get(_ROWS, max(total, 1))
    else:
        groups = table.shape[0]
        if total % max(groups, 1) or not groups:
            raise refuse(
                f"{total} rows of queries do not fall into {groups} groups of one size",
                "prefix_table.shape",
                table.shape,
                "prefix_groups",
                "give prefix_starts: where each group's rows of queries begin, int32 [groups + 1]",
            )
        each = total // groups
        rows, o = _parted(rows, groups, each), _parted(o, groups, each)
        lse = TensorDesc(lse.dtype, (groups, heads, each), (each, lse.strides[0], 1))
    return OperationRequest(ATTENTION, {"q": rows, **inputs}, {"o": o, "lse": lse}, words)


def _rows(q: TensorDesc, problem: AttentionProblem) -> TensorDesc:
    """Queries as rows of all sequences, [rows, heads, elements], where they lie."""
    if problem.varlen:
        return q
    (items, heads, count, hdim), (item, head, row, col) = q.shape, q.strides
    if items > 1 and count > 1 and item != count * row:
        raise refuse(
            "queries of several rows each lie so that those of all sequences are not equally far apart",
            "q.strides",
            q.strides,
            "prefix_rows",
            'give rows before heads (layout="bshd"), or cu_seqlens_q and q as [rows, heads, elements]',
        )
    apart = item if count == 1 and items > 1 else row
    return TensorDesc(q.dtype, (items * count, heads, hdim), (apart, head, col))


def _parted(rows: TensorDesc, groups: int, each: int) -> TensorDesc:
    """[rows, heads, elements] as [groups, heads, rows of each, elements]."""
    (_, heads, hdim), (row, head, col) = rows.shape, rows.strides
    return TensorDesc(rows.dtype, (groups, heads, each, hdim), (each * row, head, row, col))

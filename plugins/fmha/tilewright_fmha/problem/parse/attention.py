"""From a request to a problem: every check that a caller's mistake can fail, each with field, value, rule and fix."""

from __future__ import annotations

from tilewright_fmha.problem.attributes import Attributes, read_attributes
from tilewright_fmha.problem.operands import Tensors, read_tensors
from tilewright_fmha.problem.parse.append import parse_append
from tilewright_fmha.problem.parse.backward import parse_backward
from tilewright_fmha.problem.parse.keys import read_keys, read_values
from tilewright_fmha.problem.parse.options import need_dropout, read_dtype, read_scaling
from tilewright_fmha.problem.parse.prefix import has_prefix, parse_prefixed
from tilewright_fmha.problem.parse.scores import score_fields
from tilewright_fmha.problem.problem import AttentionProblem, Paging
from tilewright_fmha.problem.shapes import Sizes, check_heads, check_lengths, check_work, read_queries
from tilewright_fmha.vocabulary import FmhaDType, Scores
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.types.dtypes import DType

__all__ = ["parse_append", "parse_attention", "parse_backward"]


def parse_attention(request: OperationRequest) -> AttentionProblem:
    """Check a request and infer what it left out. Raises ``InvalidArgumentError`` or ``UnsupportedError``."""
    return parse_prefixed(request, _parse) if has_prefix(request) else _parse(request)


def _parse(request: OperationRequest) -> AttentionProblem:
    """A request without prefixes that sequences share."""
    tensors = read_tensors(request)
    attributes = read_attributes(request.attributes, request.operation)
    read_values(tensors, attributes)
    sizes = read_queries(tensors, attributes)
    paging = read_keys(tensors, attributes, sizes)
    check_heads(sizes, "k", tensors.inputs["k"])
    check_lengths(tensors, sizes)
    check_work(0, sizes, "q", tensors.inputs["q"])
    dtype = read_dtype(tensors, attributes, ("q", "k", "v"), "o")
    scores = score_fields(tensors, attributes, sizes, dtype)
    scaling = read_scaling(tensors, attributes, sizes, dtype, paging)
    _check_scores(tensors, attributes, dtype, paging)
    _outputs(tensors, attributes, sizes, dtype)
    problem = AttentionProblem(
        **scores,
        tensors=tensors.operands(),
        places=tuple(tensors.places.values()),
        lse="lse" in tensors.outputs,
        randval="randval" in tensors.outputs,
        scores=attributes.scores,
        status="status" in tensors.outputs,
        paging=paging,
        scaling=scaling,
        cache_items=0 if paging or sizes.varlen else tensors.inputs["k"].shape[0],
        v_in_k=tensors.v_in_k,
        num_splits=attributes.num_splits,
        min_q=attributes.min_q,
    )
    check_work(problem.num_ops, sizes, "q", tensors.inputs["q"])
    return problem


def _check_scores(tensors: Tensors, attributes: Attributes, dtype: FmhaDType, paging: Paging | None) -> None:
    """Scores are written by a kernel that reads keys in rows, of types without factors."""
    if attributes.scores is Scores.NONE:
        if "scores" in tensors.given:
            raise refuse(
                "scores is described, but nothing says which",
                "scores",
                tensors.given["scores"].shape,
                "scores_given",
                "set return_scores to scaled, softcap, masked or probabilities, or leave the output scores out",
            )
        return
    for wrong, what, fix in (
        (paging is not None, "keys in pages", "give keys [batch, heads, rows, elements], or sequences end to end"),
        (dtype.kv.bytes == 1, f"keys in {dtype.kv}", "give keys in fp32, fp16 or bf16"),
    ):
        if wrong:
            raise refuse(
                f"scores are no output of attention over {what}",
                "attributes.return_scores",
                attributes.scores.value,
                "scores_operands",
                fix,
            )


def _outputs(tensors: Tensors, attributes: Attributes, sizes: Sizes, dtype: FmhaDType) -> None:
    """Optional ones are computed if an attribute asks for them or the caller described them."""
    q = tensors.inputs["q"]
    tensors.output("o", sizes.output_shape, dtype.o, q)
    for name in ("q", "o"):
        tensors.place(name, sizes.varlen)
    if attributes.lse or "lse" in tensors.given:
        tensors.output("lse", sizes.lse_shape, DType.FP32)
        tensors.place("lse", False, "hr" if sizes.varlen else "bhr")
    if attributes.randval or "randval" in tensors.given:
        need_dropout(attributes)
        tensors.output("randval", sizes.randval_shape, DType.INT8)
        tensors.place("randval", False, "hrc" if sizes.varlen else "bhrc")
    if attributes.scores is not Scores.NONE:
        tensors.output("scores", sizes.randval_shape, DType.FP32)
        tensors.place("scores", False, "hrc" if sizes.varlen else "bhrc")
    if attributes.status or "status" in tensors.given:
        tensors.plain_output("status", (4,), DType.INT32)

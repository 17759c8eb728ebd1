"""Requests for gradients: the forward pass's tensors and attributes, what it gave, and the gradient of its output."""

from __future__ import annotations

from tilewright_fmha.problem.attributes import Attributes, read_attributes
from tilewright_fmha.problem.operands import Tensors, read_tensors
from tilewright_fmha.problem.parse.keys import read_keys
from tilewright_fmha.problem.parse.options import need_dropout, read_dtype
from tilewright_fmha.problem.parse.scores import score_fields
from tilewright_fmha.problem.problem import AttentionBackwardProblem
from tilewright_fmha.problem.shapes import Sizes, check_heads, check_lengths, check_work, read_queries
from tilewright_fmha.vocabulary import BiasKind
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.types.dtypes import DType

__all__ = ["parse_backward"]


def parse_backward(request: OperationRequest) -> AttentionBackwardProblem:
    """Check a request and infer what it left out. Raises ``InvalidArgumentError`` or ``UnsupportedError``."""
    tensors = read_tensors(request)
    attributes = read_attributes(request.attributes, request.operation)
    sizes = read_queries(tensors, attributes)
    read_keys(tensors, attributes, sizes)
    check_heads(sizes, "k", tensors.inputs["k"])
    check_lengths(tensors, sizes)
    check_work(0, sizes, "q", tensors.inputs["q"])
    _check_dtypes(tensors)
    dtype = read_dtype(tensors, attributes, ("q", "k", "v"), "o")
    _check_saved(tensors, sizes)
    scores = score_fields(tensors, attributes, sizes, dtype)
    _outputs(tensors, attributes, sizes, scores["bias"])
    problem = AttentionBackwardProblem(
        **scores,
        tensors=tensors.operands(),
        places=tuple(tensors.places.values()),
        lse=True,
        randval="randval" in tensors.outputs,
        dbias="dbias" in tensors.outputs,
        dsinks="dsinks" in tensors.outputs,
        deterministic=attributes.deterministic,
        cache_items=0 if sizes.varlen else sizes.batch,
    )
    check_work(2 * problem.num_ops, sizes, "q", tensors.inputs["q"])
    return problem


def _check_dtypes(tensors: Tensors) -> None:
    for name in ("q", "k", "v"):
        dtype = tensors.inputs[name].dtype
        if dtype.bytes == 1:
            raise refuse(
                f"there are no gradients of {dtype} operands: they have too few bits for them",
                f"{name}.dtype",
                dtype.value,
                "backward_dtype",
                "give q, k, v, o and do as fp32, fp16 or bf16",
            )


def _check_saved(tensors: Tensors, sizes: Sizes) -> None:
    """``o``, ``lse`` and ``do`` are what the forward pass gives for these very queries."""
    for name, shape in (("o", sizes.output_shape), ("do", sizes.output_shape), ("lse", sizes.lse_shape)):
        desc = tensors.inputs[name]
        if desc.shape != shape:
            raise refuse(
                f"{name} has shape {list(desc.shape)}, but the forward pass gives {list(shape)}",
                f"{name}.shape",
                desc.shape,
                "gradient_shape",
                f"give {name} of shape {list(shape)}",
            )
        wanted = DType.FP32 if name == "lse" else tensors.inputs["o"].dtype
        if desc.dtype != wanted:
            raise refuse(
                f"{name} is {desc.dtype}, not {wanted}",
                f"{name}.dtype",
                desc.dtype.value,
                "gradient_dtype",
                f"give {name} as {wanted}" + (", as o is" if name == "do" else ""),
            )
        tensors.place(name, sizes.varlen, ("hr" if sizes.varlen else "bhr") if name == "lse" else "")
    tensors.place("q", sizes.varlen)


def _outputs(tensors: Tensors, attributes: Attributes, sizes: Sizes, bias: BiasKind) -> None:
    for name in ("q", "k", "v"):
        like = tensors.inputs[name]
        tensors.output(f"d{name}", like.shape, like.dtype, like)
        tensors.place(f"d{name}", sizes.varlen)
    if attributes.dbias or "dbias" in tensors.given:
        if bias is not BiasKind.ELEMENTWISE:
            raise refuse(
                "the gradient of a bias is asked for, but there is no bias",
                "attributes.return_dbias" if attributes.dbias else "dbias",
                True,
                "dbias_bias",
                "give bias, or leave dbias out (slopes have no gradient)",
            )
        own = tensors.inputs["bias"]
        tensors.output("dbias", own.shape, own.dtype)
        tensors.place("dbias", False, "bhrc")
    if "sinks" in tensors.inputs:
        tensors.plain_output("dsinks", (sizes.heads_q,), DType.FP32)
    elif "dsinks" in tensors.given:
        raise refuse(
            "the gradient of learned sinks is asked for, but there are none",
            "dsinks",
            tensors.given["dsinks"].shape,
            "sinks_shape",
            "give sinks, as in the forward pass",
        )
    if attributes.randval or "randval" in tensors.given:
        need_dropout(attributes)
        tensors.output("randval", sizes.randval_shape, DType.INT8)
        tensors.place("randval", False, "hrc" if sizes.varlen else "bhrc")

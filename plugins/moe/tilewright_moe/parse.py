"""Requests as checked problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright_gemm.fusion import ScaleBlock, check_block_scales, default_output, output_dtypes
from tilewright_kit.contract.problem import Operand, OperationRequest, Role
from tilewright_kit.requests.attributes import (
    check_tensor,
    known_names,
    refuse,
    suggest,
    take_alignment,
    take_dtype,
    take_finite,
    take_flag,
    take_int,
    take_word,
)
from tilewright_kit.requests.operands import check_dtype_agrees, check_output, check_pair
from tilewright_kit.requests.products import ALPHA, FAST_ACCUMULATION, OUT_DTYPE
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc
from tilewright_moe.declaration import (
    ACTIVATION,
    ATTRIBUTES,
    DTYPES,
    EXPECTED_ROWS,
    INPUTS,
    OUT_SCALE_BLOCK,
    OUTPUTS,
    RETURN_STATUS,
    SCALE_BLOCK,
    Activation,
    ResultBlock,
)
from tilewright_moe.problem import RESULT_BLOCK, TURN, MoeProblem

__all__ = ["parse_moe"]


def parse_moe(request: OperationRequest) -> MoeProblem:
    """A checked problem. Raises ``InvalidArgumentError`` with field, value, rule and fix."""
    given, described = request.inputs, request.outputs
    for name, desc in (*given.items(), *described.items()):
        check_tensor(name, desc)
    for names, known in ((given, INPUTS), (described, OUTPUTS)):
        for name in names:
            if name not in known:
                raise refuse(f"there is no tensor {name!r}", name, name, "operand_known", suggest(name, known))
    for name in ("x", "w", "counts"):
        if name not in given:
            raise refuse(f"the input {name} is missing", name, "", "operand_missing", f"give the tensor {name}")
    for name, desc in (*given.items(), *described.items()):
        if desc.packing:
            raise refuse(f"{name} cannot be packed", f"{name}.packing", desc.packing, "packed_operand", "unpack it")
    known_names(request.attributes, ATTRIBUTES)
    x, w = given["x"], given["w"]
    _rank("x", x, (2, 3), "[rows, K], or [experts, rows, K]")
    _rank("w", w, (3,), "[experts, N, K]")
    for name, desc in (("x", x), ("w", w)):
        _dtype(name, desc, DTYPES)
    check_pair("product", x.dtype, "w", w.dtype, "w")
    experts, n, k = w.shape
    if experts == 0:
        raise refuse("there is no expert", "w.shape", w.shape, "expert_count", "give the weights of at least one")
    masked = len(x.shape) == 3
    if x.shape[-1] != k:
        fix = "make the last dimension of x equal to that of w, which is [experts, N, K]"
        raise refuse(f"x has rows of {x.shape[-1]}, but w has {k} columns", "x.shape", x.shape, "k_mismatch", fix)
    if masked and x.shape[0] != experts:
        fix = "make the first dimensions of x and w equal, or give x as [rows, K]"
        raise refuse(f"x is of {x.shape[0]} experts, but w of {experts}", "x.shape", x.shape, "expert_count", fix)
    _counts(given["counts"], experts)
    block = take_word(request.attributes, SCALE_BLOCK, ScaleBlock, "a pair of blocks") or ScaleBlock.NONE
    _scales(given, block)
    gated = take_word(request.attributes, ACTIVATION, Activation, "an activation") is Activation.SWIGLU
    quantised = take_word(request.attributes, OUT_SCALE_BLOCK, ResultBlock, "a block") is ResultBlock.ROWS
    if gated and n % (2 * TURN):
        fix = f"join {TURN} rows of the gate's weights and {TURN} of the other's in turn, padded with zeros (the "
        fix += "client's join_gate_up joins them)"
        raise refuse(f"w has {n} rows of both projections", "w.shape", w.shape, "swiglu_columns", fix)
    n = n // 2 if gated else n
    out = _output(request, (*x.shape[:-1], n), x.dtype, quantised)
    _lines("x", x, "x")
    _lines("out", out, "out")
    inputs = [Operand(name, given[name], Role.INPUT) for name in INPUTS if name in given]
    outputs = [Operand("out", out, Role.OUTPUT)]
    if take_flag(request.attributes, RETURN_STATUS) or "status" in described:
        status = described.get("status", TensorDesc.of("int32", (4,)))
        _dtype("status", status, (DType.INT32,))
        check_output("status", status, (4,))
        if not status.is_contiguous:
            raise refuse("status has gaps", "status.strides", status.strides, "status_layout", "give it stride 1")
        outputs.append(Operand("status", status, Role.OUTPUT))
    if scales := _output_scale(request, out, quantised):
        outputs.append(Operand("out_scale", scales, Role.OUTPUT))
    return MoeProblem(
        tensors=(*inputs, *outputs),
        layout=f"r{_layout(w)}r",
        masked=masked,
        experts=experts,
        rows=x.shape[-2],
        n=n,
        k=k,
        expected_rows=take_int(request.attributes, EXPECTED_ROWS),
        alpha=take_finite(request.attributes, ALPHA),
        alignment=take_alignment(request.attributes),
        fast_accumulation=take_flag(request.attributes, FAST_ACCUMULATION),
        scale_block=block,
        gated=gated,
        quantised=quantised,
    )


def _rank(name: str, desc: TensorDesc, ranks: tuple[int, ...], form: str) -> None:
    if len(desc.shape) not in ranks:
        raise refuse(f"{name} has {len(desc.shape)} dimensions", f"{name}.shape", desc.shape, "rank", f"give {form}")


def _dtype(name: str, desc: TensorDesc, allowed: tuple[DType, ...]) -> None:
    if desc.dtype not in allowed:
        fix = f"use one of: {', '.join(allowed)}"
        raise refuse(f"{name} cannot be {desc.dtype}", f"{name}.dtype", desc.dtype.value, "operand_dtype", fix)


def _counts(desc: TensorDesc, experts: int) -> None:
    _dtype("counts", desc, (DType.INT32,))
    if desc.shape != (experts,):
        fix = f"give the rows of each expert: shape [{experts}]"
        raise refuse(f"counts has shape {list(desc.shape)}", "counts.shape", desc.shape, "counts_shape", fix)
    if not desc.is_contiguous:
        raise refuse("counts has gaps", "counts.strides", desc.strides, "counts_layout", "give it stride 1")


def _scales(given: Mapping[str, TensorDesc], block: ScaleBlock) -> None:
    """Factors of tensors and experts, or of blocks, which GEMM judges."""
    x, w = given["x"], given["w"]
    if block is ScaleBlock.NONE:
        for name in ("scale_x", "scale_w"):
            if name in given:
                _scale(name, given[name], w.shape[0] if name == "scale_w" else 1)
        return
    roles = {"a": "x", "b": "w", "scale_a": "scale_x", "scale_b": "scale_w"}
    named = {role: (name, given[name]) for role, name in roles.items() if name in given}
    columns = replace(w, shape=(w.shape[0], w.shape[2], w.shape[1]), strides=(w.strides[0], w.strides[2], w.strides[1]))
    check_block_scales(named, block, x, columns, (roles["scale_a"], roles["scale_b"]))
    for name, lead in (("scale_x", x.shape[:-2]), ("scale_w", w.shape[:1])):
        if given[name].shape[:-2] != lead:
            wanted = [*lead, *given[name].shape[-2:]]
            raise refuse(
                f"{name} is {list(given[name].shape)}; blocks {block} of {name[-1]} need {wanted}",
                f"{name}.shape",
                given[name].shape,
                "block_scale_shape",
                f"give one factor for each block: {wanted}",
            )


def _scale(name: str, desc: TensorDesc, experts: int) -> None:
    _dtype(name, desc, (DType.FP32,))
    if desc.shape not in ((), (1,), (experts,)):
        fix = "give one number" + (f", or one for each of the {experts} experts" if name == "scale_w" else "")
        raise refuse(f"{name} has shape {list(desc.shape)}", f"{name}.shape", desc.shape, "scale_shape", fix)


def _output_scale(request: OperationRequest, out: TensorDesc, quantised: bool) -> TensorDesc | None:
    """Factors of blocks of the result, where they are asked for."""
    desc = request.outputs.get("out_scale")
    if not quantised:
        if desc is not None:
            fix = f"set {OUT_SCALE_BLOCK.name} to 1x{RESULT_BLOCK}, or leave out_scale out"
            raise refuse("results that are not quantised have no factors", "out_scale", "", "out_scale_operand", fix)
        return None
    shape = (*out.shape[:-1], -(-out.shape[-1] // RESULT_BLOCK))
    desc = desc or TensorDesc.of(DType.FP32, shape)
    _dtype("out_scale", desc, (DType.FP32,))
    check_output("out_scale", desc, shape)
    return desc


def _output(request: OperationRequest, shape: tuple[int, ...], dtype: DType, quantised: bool) -> TensorDesc:
    wanted = take_dtype(request.attributes, OUT_DTYPE) or (DType.FP8 if quantised else None)
    desc = request.outputs.get("out")
    if desc is None:
        desc = TensorDesc.of(wanted or default_output(dtype), shape)
    check_output("out", desc, shape, "product")
    check_dtype_agrees("out", desc, wanted)
    allowed = (DType.FP8,) if quantised else output_dtypes(dtype)
    if desc.dtype not in allowed:
        fix = f"use one of: {', '.join(allowed)}"
        raise refuse(f"a product of {dtype} cannot be {desc.dtype}", "out.dtype", desc.dtype.value, "output_dtype", fix)
    return desc


def _lines(name: str, desc: TensorDesc, what: str) -> None:
    if desc.shape[-1] > 1 and desc.strides[-1] != 1:
        fix = f"give {what} with a last dimension of stride 1: make a contiguous copy"
        raise refuse(f"rows of {name} have gaps", f"{name}.strides", desc.strides, "row_layout", fix)


def _layout(w: TensorDesc) -> str:
    if w.strides[2] == 1 or w.shape[2] <= 1:
        return "c"
    if w.strides[1] == 1 or w.shape[1] <= 1:
        return "r"
    fix = "give w with stride 1 along N or K: make a contiguous copy"
    raise refuse("neither N nor K of w has stride 1", "w.strides", w.strides, "weight_layout", fix)

"""Problems of the same kind with other sizes, for which the model is compared with measurements."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_gemm.config.block_scales import block_of, block_word, scale_shapes
from tilewright_gemm.config.int4 import group_shape, has_zeros, packed_rows
from tilewright_gemm.config.narrow import narrow_a, narrow_b
from tilewright_gemm.problem.parse import parse_gemm
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import BFormat, ScaleA, ScaleB
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.describe import step_attributes
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["block_operands", "resized_gemm"]


def resized_gemm(problem: GemmProblem, sizes: Mapping[str, int]) -> GemmProblem | None:
    """One product of the sizes m, n, k and batch, its operands contiguous. None for groups and packed operands."""
    if problem.grouped or problem.packing is not None or not {"m", "n", "k"} <= set(sizes):
        return None
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    lead = (sizes["batch"],) if sizes.get("batch", 1) > 1 else ()
    inputs = {
        "a": _matrix(problem.dtype_a.value, lead, m, k, problem.layout[0]),
        "b": _matrix(problem.dtype_b.value, lead, k, n, problem.layout[1]),
    }
    if problem.dtype_bias is not None:
        inputs["bias"] = TensorDesc.of(problem.dtype_bias, (n,))
    for index, dtype in enumerate(problem.dtype_d):
        inputs[f"d[{index}]"] = TensorDesc.of(dtype, (*lead, m, n))
    attributes = {"out_dtype": problem.dtype_c.value, **step_attributes(problem, sizes)}
    if problem.block_scaled:
        own, words = block_operands(problem.scale_a, problem.scale_b, lead, (m, n, k))
        inputs |= own
        attributes |= words
        return parse_gemm(OperationRequest("gemm", inputs, {}, attributes))
    if problem.int4:
        inputs["b"] = _matrix("int8", lead, packed_rows(k), n, "c")
        inputs["scale_b"] = TensorDesc.of(problem.scale_dtype, group_shape(n, k))
        if has_zeros(problem.scale_b):
            inputs["zero_b"] = TensorDesc.of("int8", group_shape(n, k))
        attributes["b_format"] = BFormat.INT4.value
    if problem.scale_a is not ScaleA.NONE:
        inputs["scale_a"] = TensorDesc.of("fp32", (m, 1) if problem.scale_a is ScaleA.ROW else ())
    if problem.scale_b is not ScaleB.NONE and not problem.int4:
        inputs["scale_b"] = TensorDesc.of("fp32", (n,) if problem.scale_b is ScaleB.COLUMN else ())
    return parse_gemm(OperationRequest("gemm", inputs, {}, attributes))


def block_operands(
    scale_a: ScaleA, scale_b: ScaleB, lead: tuple[int, ...], sizes: tuple[int, int, int]
) -> tuple[dict[str, TensorDesc], dict[str, str]]:
    """The scales of blocks, operands that are packed, and the attributes that say so, of a product m x n x k."""
    m, n, k = sizes
    dtype = block_of(scale_b).dtype
    shapes = zip(("scale_a", "scale_b"), scale_shapes(scale_b, m, n, k), strict=True)
    inputs = {name: TensorDesc.of(dtype, shape) for name, shape in shapes}
    words = {"scale_block": block_word(scale_a, scale_b).value}
    if form := narrow_a(scale_a):
        inputs["a"], words["a_format"] = _matrix("int8", lead, m, form.bytes_of(k), "r"), form.name
    if form := narrow_b(scale_b):
        inputs["b"], words["b_format"] = _matrix("int8", lead, form.bytes_of(k), n, "c"), form.name
    return inputs, words


def _matrix(dtype: str, lead: tuple[int, ...], rows: int, columns: int, letter: str) -> TensorDesc:
    strides = (columns, 1) if letter == "r" else (1, rows)
    return TensorDesc.of(dtype, (*lead, rows, columns), (*(rows * columns for _ in lead), *strides))

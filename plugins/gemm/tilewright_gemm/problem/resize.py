"""Problems of the same kind with other sizes, for which the model is compared with measurements."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright_gemm.config.block_scales import block_of, block_word, scale_shapes
from tilewright_gemm.config.int4 import group_shape, has_zeros, packed_rows
from tilewright_gemm.problem.parse import parse_gemm
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import BFormat, ScaleA, ScaleB
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.describe import step_attributes
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["resized_gemm"]


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
        shapes = scale_shapes(problem.scale_b, m, n, k)
        dtype = block_of(problem.scale_b).dtype
        inputs |= {
            name: TensorDesc.of(dtype, shape) for name, shape in zip(("scale_a", "scale_b"), shapes, strict=True)
        }
        attributes["scale_block"] = block_word(problem.scale_a, problem.scale_b).value
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


def _matrix(dtype: str, lead: tuple[int, ...], rows: int, columns: int, letter: str) -> TensorDesc:
    strides = (columns, 1) if letter == "r" else (1, rows)
    return TensorDesc.of(dtype, (*lead, rows, columns), (*(rows * columns for _ in lead), *strides))

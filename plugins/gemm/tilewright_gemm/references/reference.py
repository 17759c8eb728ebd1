"""The truth, in NumPy: float64 throughout, exact integers for int8 products with int32 results.

Readable rather than fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_gemm.config.block_scales import spread_factors
from tilewright_gemm.config.int4 import GROUP_K, MIDDLE
from tilewright_gemm.config.narrow import Narrow, narrow_a, narrow_b
from tilewright_gemm.config.packing import Packing, VectorFormat
from tilewright_gemm.problem.problem import GemmProblem, PackBProblem
from tilewright_gemm.vocabulary import Binary
from tilewright_kit.contract.problem import Role
from tilewright_kit.numerics.elementwise import apply_unary
from tilewright_kit.types.dtypes import DType

__all__ = ["apply_unary", "narrow_values", "reference_gemm", "reference_pack_b", "unpack", "unpacked_weights"]

Array = npt.NDArray[Any]


def reference_gemm(problem: GemmProblem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name, unrounded float64 (int64 for int32 results, wrapped as int32 sums wrap).

    ``inputs`` have the shapes of the problem's operands. A packed B cannot be read back: pass the matrix it was packed
    from.
    """
    outputs = {}
    for operand in problem.operands:
        if operand.role is Role.OUTPUT:
            group = operand.name.removeprefix("out")
            outputs[operand.name] = _group(problem, inputs, group, operand.desc.shape)
    return outputs


def reference_pack_b(problem: PackBProblem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The matrix itself: what ``unpack`` of the packed bytes must return."""
    exact: Any = np.int64 if problem.dtype_a == DType.INT8 else np.float64
    return {"out": np.asarray(inputs["b"]).astype(exact)}


def unpack(packed: Array, layout: Packing, k: int, n: int) -> Array:
    """The K x N matrix in packed bytes (``uint8``), in float64."""
    if isinstance(layout, VectorFormat):
        own = np.asarray(packed)[: layout.nbytes(k, n)].view(DType(layout.element).numpy).astype(np.float64)
        vectors: Array = own.reshape(-(-n // layout.columns), -1, layout.columns, layout.values).transpose(1, 3, 0, 2)
        return vectors.reshape(-1, vectors.shape[2] * vectors.shape[3])[:k, :n]
    groups, panels = -(-k // layout.vk), -(-n // layout.nr)
    count = panels * groups * layout.nr * layout.vk
    element = np.int16 if layout.element == "int16" else DType(layout.element).numpy
    values = np.asarray(packed)[: count * np.dtype(element).itemsize].view(element).astype(np.float64)
    ordered: Array = values.reshape(panels, groups, layout.nr, layout.vk).transpose(1, 3, 0, 2)
    return ordered.reshape(groups * layout.vk, panels * layout.nr)[:k, :n]


def _group(problem: GemmProblem, inputs: Mapping[str, Array], group: str, shape: tuple[int, ...]) -> Array:
    integers = problem.dtype_a == DType.INT8 and not problem.int4
    exact: Any = np.int64 if integers else np.float64
    a, b = _factors(problem, inputs, group, exact)
    if problem.int4:
        b = unpacked_weights(inputs, group, a.shape[-1])
    product: Array = _scaled_blocks(problem, inputs, group, a, b) if problem.block_scaled else np.matmul(a, b)
    if integers:
        product = (product + 2**31) % 2**32 - 2**31  # int32 accumulators wrap around
    if problem.dtype_c == DType.INT32:
        return product
    x = product.astype(np.float64) * problem.alpha
    if "scale_a" + group in inputs and not problem.block_scaled:
        scale = _float(inputs["scale_a" + group])
        rows = shape[-2]
        per_row = scale.ndim and scale.shape[-1] == rows and scale.shape[-2:] != (rows, 1)
        x = x * (scale[..., None] if per_row else scale)
    if "scale_b" + group in inputs and not (problem.block_scaled or problem.int4):
        x = x * _float(inputs["scale_b" + group])
    if "bias" + group in inputs:
        x = x + _float(inputs["bias" + group])
    for name in _d_names(problem, inputs, group):
        operand = _float(inputs[name])
        x = x * operand if problem.binary in (Binary.MULTIPLY, Binary.MULTI_D_MULTIPLY) else x + operand
    return np.broadcast_to(apply_unary(problem.unary, x, problem.clamp_lo, problem.clamp_hi), shape)


def _factors(problem: GemmProblem, inputs: Mapping[str, Array], group: str, exact: Any) -> tuple[Array, Array]:
    """A and B as the numbers that they stand for; 4-bit weights as their bytes."""
    a, b = (np.asarray(inputs[name + group]) for name in ("a", "b"))
    form_a, form_b = narrow_a(problem.scale_a), narrow_b(problem.scale_b)
    if form_a or form_b:
        along = [form.held_in(size) if form else size for form, size in ((form_a, a.shape[-1]), (form_b, b.shape[-2]))]
        a = narrow_values(a, form_a, min(along)) if form_a else a
        b = np.swapaxes(narrow_values(np.swapaxes(b, -1, -2), form_b, min(along)), -1, -2) if form_b else b
    return a.astype(exact), b.astype(exact)


def narrow_values(stored: Array, form: Narrow, k: int) -> Array:
    """The numbers [.., k] of packed bytes [.., ceil(k bits / 8)]."""
    import ml_dtypes

    bits = np.unpackbits(np.ascontiguousarray(stored).view(np.uint8), axis=-1, bitorder="little")
    codes = bits[..., : k * form.bits].reshape(*bits.shape[:-1], k, form.bits)
    found: Array = np.packbits(codes, axis=-1, bitorder="little")[..., 0].view(getattr(ml_dtypes, form.numpy))
    return found.astype(np.float64)


def _scaled_blocks(problem: GemmProblem, inputs: Mapping[str, Array], group: str, a: Array, b: Array) -> Array:
    """A times B with every element of both times the scale of its block: the sum over blocks, in float64."""
    k, n = b.shape[-2:]
    scale_a, scale_b = spread_factors(inputs["scale_a" + group], inputs["scale_b" + group], problem.scale_b, n, k)
    product: Array = np.matmul(a * scale_a, b * np.swapaxes(scale_b, -1, -2))
    return product


def unpacked_weights(inputs: Mapping[str, Array], group: str, k: int) -> Array:
    """The matrix [.., K, N] that packed 4-bit weights stand for, scaled."""
    stored = np.asarray(inputs["b" + group]).astype(np.int64) & 0xFF
    pairs = np.stack([stored & 15, stored >> 4], axis=-2)
    values = pairs.reshape(*stored.shape[:-2], -1, stored.shape[-1])[..., :k, :].astype(np.float64)
    zeros = inputs.get("zero_b" + group)
    shift: Any = MIDDLE if zeros is None else _of_groups((np.asarray(zeros).astype(np.int64) & 15), k)
    found: Array = (values - shift) * _of_groups(_float(inputs["scale_b" + group]), k)
    return found


def _of_groups(own: Array, k: int) -> Array:
    """Values of groups [.., N, groups] for every element [.., K, N]."""
    return np.swapaxes(np.repeat(own, GROUP_K, axis=-1)[..., :k], -1, -2)


def _d_names(problem: GemmProblem, inputs: Mapping[str, Array], group: str) -> list[str]:
    names = [f"d{group}[{index}]" for index in range(problem.num_d)]
    return [name for name in (*names, "c" + group) if name in inputs]


def _float(array: Array) -> Array:
    return np.asarray(array).astype(np.float64)

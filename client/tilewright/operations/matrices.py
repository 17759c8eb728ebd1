"""Matrices as people give them: in layouts that no kernel reads or writes, with scales that are plain numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.session.state import Core
from tilewright.tensor.interop import recognise, recognise_output
from tilewright.types.addresses import address_of
from tilewright.types.arguments import number
from tilewright.types.spec import Array, Spec, dense, element_strides, span_bytes

__all__ = ["deliver", "fold_scales", "laid_out", "readable", "writable"]


def fold_scales(a: Any, alpha: Any, scale_a: Any, scale_b: Any) -> tuple[Any, Any, Any]:
    """``alpha`` with the scales in it that are plain numbers, if ``a`` is a matrix of floats on a device: operands of
    the host would have to be copied there for every call.
    """
    tensor = recognise(a, "a")
    if tensor is None or tensor.spec.dtype.name.startswith("int"):
        return alpha, scale_a, scale_b
    factor = number("alpha", alpha)
    left: list[Any] = []
    for scale in (scale_a, scale_b):
        plain = isinstance(scale, (int, float, np.floating)) and not isinstance(scale, bool)
        factor *= number("scale", scale) if plain else 1.0
        left.append(None if plain else scale)
    return factor, left[0], left[1]


def readable(matrix: Any, field: str) -> Any:
    """The matrix, or a contiguous copy if its elements are adjacent along neither dimension: no kernel reads that."""
    if (tensor := recognise(matrix, field)) is not None:
        apart = tensor.spec.strides is not None and 1 not in tensor.spec.strides[-2:]
        # A copy by the library that made it, in the order of its stream.
        return matrix.contiguous() if apart and tensor.library == "torch" else tensor
    if not isinstance(matrix, np.ndarray) or matrix.ndim < 2:
        return matrix
    return matrix if _adjacent(matrix, -1) or _adjacent(matrix, -2) else np.ascontiguousarray(matrix)


def _adjacent(matrix: Array, axis: int) -> bool:
    return bool(matrix.shape[axis] <= 1 or matrix.strides[axis] == matrix.dtype.itemsize)


def writable(out: Any) -> Any:
    """Target that the server writes for ``out``: kernels write rows, so for any other array a fresh one, to be
    copied.
    """
    if (tensor := recognise_output(out, "out")) is not None:
        apart = tensor.spec.strides is not None and tensor.spec.strides[-1] != 1
        return Spec(tensor.spec.shape, tensor.spec.dtype) if apart and tensor.library == "torch" else tensor
    if isinstance(out, np.ndarray) and out.ndim >= 2 and out.flags.writeable and not _adjacent(out, -1):
        return Spec.of(out.shape, out.dtype)
    return out


def laid_out(core: Core, out: Any) -> Any:
    """Target that the server writes for ``out``: for an array of other than shared memory a fresh one in its layout,
    to be copied.
    """
    if (tensor := recognise_output(out, "out")) is not None:
        return tensor
    if not isinstance(out, np.ndarray) or out.flags.c_contiguous or not out.size or not out.flags.writeable:
        return out
    shared = element_strides(out) is not None and core.pool.find(address_of(out), span_bytes(out)) is not None
    return out if shared else Spec.of(out.shape, out.dtype, dense(out)[1])


def deliver(core: Core, out: Any, result: Any) -> Any:
    if out is not None and result is not out and hasattr(out, "data_ptr"):
        out.copy_(result)  # PyTorch's, behind the product on the stream
        return out
    if not isinstance(out, np.ndarray) or result is out:
        return result
    out[...] = result
    if core.report is not None:
        core.report = replace(core.report, staged_bytes=core.report.staged_bytes + out.nbytes)
    return out

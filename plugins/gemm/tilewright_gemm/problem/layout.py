"""Strides: broadcasting, collapsing many batch dimensions into one, and telling row-major from column-major."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tilewright_gemm.problem.attributes import refuse
from tilewright_kit.types.tensor import TensorDesc, overlaps

__all__ = ["Batch", "Slot", "broadcast_shapes", "collapse", "layouts_of", "overlaps", "slot"]


_OF_COLUMNS = ("b", "bias", "scale_b", "zero_b")
"""Operands that do not vary along rows of the result."""


@dataclass(frozen=True, slots=True)
class Slot:
    """An operand broadcast over the batch: strides of its last two dimensions (0 where it broadcasts) and of every
    batch dimension.
    """

    row_stride: int
    col_stride: int
    batch_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The outcome of collapsing: one strided batch, ``m`` rows (batches may have become rows), and the offsets of what
    could not be collapsed.
    """

    size: int
    m: int
    slots: Mapping[str, Slot]
    """With exactly one batch stride each."""
    offsets: tuple[Mapping[str, int], ...]
    """One mapping of operand to offset for each product that the batch falls into."""


def broadcast_shapes(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[int, ...]:
    """Broadcast batch shapes by NumPy's rule. Raises ``InvalidArgumentError`` naming the operand that does not fit."""
    result: tuple[int, ...] = ()
    for name, shape in shapes:
        rank = max(len(result), len(shape))
        have = (1,) * (rank - len(result)) + result
        more = (1,) * (rank - len(shape)) + shape
        for left, right in zip(have, more, strict=True):
            if left != right and 1 not in (left, right):
                raise refuse(
                    f"{name} has batch dimensions {list(shape)}, which do not broadcast with {list(result)}",
                    f"{name}.shape",
                    shape,
                    "batch_broadcast",
                    "make the leading dimensions equal, or 1 where one matrix serves all",
                )
        result = tuple(right if left == 1 else left for left, right in zip(have, more, strict=True))
    return result


def slot(name: str, desc: TensorDesc, target: tuple[int, ...]) -> Slot:
    """``desc`` broadcast to ``target`` (batch dimensions, rows, columns).

    Raises ``InvalidArgumentError`` if it does not broadcast.
    """
    shape, missing = desc.shape, len(target) - len(desc.shape)
    fits = missing >= 0 and all(
        have in (1, want) for have, want in zip(shape, target[max(missing, 0) :], strict=missing >= 0)
    )
    if not fits:
        raise refuse(
            f"{name} of shape {list(shape)} does not broadcast to the result's shape {list(target)}",
            f"{name}.shape",
            shape,
            "operand_broadcast",
            "give it dimensions equal to the result's, or 1 where it repeats",
        )
    own = (0,) * len(shape) if desc.packing else desc.strides
    strides = [0] * missing + [stride if size > 1 else 0 for size, stride in zip(shape, own, strict=True)]
    return Slot(strides[-2], strides[-1], tuple(strides[:-2]))


def collapse(batch: tuple[int, ...], m: int, slots: Mapping[str, Slot], foldable: bool, limit: int) -> Batch:
    """Reduce the batch dimensions to one stride per operand.

    Neighbours that lie in one arithmetic progression for every operand merge. A dimension along which B does not change
    becomes more rows of A where the strides allow it (``foldable``): a linear layer on [batch, tokens, features] is one
    product, not many small ones. Dimensions that are left beyond one become several products with offsets, at most
    ``limit``.
    """
    dims = [
        (size, {name: item.batch_strides[axis] for name, item in slots.items()})
        for axis, size in enumerate(batch)
        if size != 1
    ]
    while (pair := _mergeable(dims)) is not None:
        outer, inner = pair
        merged = (dims[outer][0] * dims[inner][0], dims[inner][1])
        dims = [dim for axis, dim in enumerate(dims) if axis not in pair] + [merged]
    rows = {name: item.row_stride for name, item in slots.items()}
    for size, strides in sorted(dims, key=lambda dim: dim[1]["out"]) if foldable else ():
        if not _is_rows(m, rows, strides):
            continue
        if m == 1:
            rows = {name: rows[name] if name in _OF_COLUMNS else strides[name] for name in slots}
        m *= size
        dims.remove((size, strides))
    dims.sort(key=lambda dim: -dim[0])
    size, along = dims[0] if dims else (1, dict.fromkeys(slots, 0))
    offsets: list[dict[str, int]] = [dict.fromkeys(slots, 0)]
    for count, strides in dims[1:]:
        if count * len(offsets) > limit:
            raise refuse(
                "the batch dimensions cannot be reached with one stride, and there are too many of them to list",
                "out.strides",
                batch,
                "batch_stride",
                f"make the operands contiguous in their batch dimensions, or use at most {limit} products in a call",
            )
        offsets = [
            {name: base[name] + index * strides[name] for name in slots} for base in offsets for index in range(count)
        ]
    collapsed = {
        name: replace(item, row_stride=rows[name], batch_strides=(along[name],)) for name, item in slots.items()
    }
    return Batch(size, m, collapsed, tuple(offsets))


def _mergeable(dims: list[tuple[int, dict[str, int]]]) -> tuple[int, int] | None:
    for outer in range(len(dims)):
        for inner in range(len(dims)):
            if outer != inner and all(
                stride == dims[inner][1][name] * dims[inner][0] for name, stride in dims[outer][1].items()
            ):
                return outer, inner
    return None


def _is_rows(m: int, rows: Mapping[str, int], strides: Mapping[str, int]) -> bool:
    for name, stride in strides.items():
        if name in _OF_COLUMNS:
            if stride != 0:
                return False
        elif m != 1 and stride != rows[name] * m:
            return False
    return m > 0


def layouts_of(rows: int, cols: int, row_stride: int, col_stride: int, prefer: str) -> str:
    """The letters (``r``, ``c``) that describe a matrix, ``prefer`` first where both do.

    Sizes of one leave the choice free.
    """
    found = ""
    if cols <= 1 or col_stride == 1:
        found += "r"
    if rows <= 1 or row_stride == 1:
        found += "c"
    return found[::-1] if len(found) == 2 and prefer == "c" else found

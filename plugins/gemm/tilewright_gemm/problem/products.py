"""Products of broadcast strides: batches collapsed, layouts told, views of every operand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright_gemm.config.block_scales import columns_of_block, scale_shapes
from tilewright_gemm.config.int4 import group_shape, is_int4, packed_rows
from tilewright_gemm.config.packing import Packing
from tilewright_gemm.problem.attributes import MAX_GROUPS, refuse
from tilewright_gemm.problem.layout import Slot, collapse, layouts_of, slot
from tilewright_gemm.problem.problem import Product, View
from tilewright_gemm.vocabulary import ScaleB
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["products_of", "slots_of"]


def slots_of(
    names: Mapping[str, str],
    descs: Mapping[str, TensorDesc],
    batch: tuple[int, ...],
    sizes: tuple[int, int, int],
    scale_b: ScaleB,
) -> dict[str, Slot]:
    """Operands broadcast over the batch. Scales of blocks run along rows (columns) first, then along k."""
    m, n, k = sizes
    block_scaled = columns_of_block(scale_b) > 0
    int4 = is_int4(scale_b)
    blocks = scale_shapes(scale_b, m, n, k) if block_scaled else ((m, 1), group_shape(n, k) if int4 else (1, n))
    slots: dict[str, Slot] = {}
    for key, desc in descs.items():
        name, target = names[key], (*batch, m, n)
        if key == "a":
            target = (*batch, m, k)
        elif key == "b":
            target = (*batch, packed_rows(k) if int4 else k, n)
        elif key == "bias":
            target = (*batch, 1, n)
        elif key == "scale_a":
            desc, target = (desc if block_scaled else _as_column(desc, m)), (*batch, *blocks[0])
        elif key in ("scale_b", "zero_b"):
            target = (*batch, *blocks[1])
        slots[key] = slot(name, desc, target)
    return slots


def _as_column(desc: TensorDesc, m: int) -> TensorDesc:
    """Per-row scales may come as [M] as well as [M, 1]."""
    if desc.shape and desc.shape[-1] == m and desc.shape[-2:] != (m, 1):
        return replace(desc, shape=(*desc.shape, 1), strides=(*desc.strides, 0))
    return desc


def products_of(
    names: Mapping[str, str],
    slots: Mapping[str, Slot],
    batch: tuple[int, ...],
    sizes: tuple[int, int, int],
    packing: Packing | None,
    num_d: int,
    out: TensorDesc,
    int4: bool = False,
) -> tuple[tuple[Product, ...], str, str]:
    """The products, and the layouts that would describe A and B."""
    m, n, k = sizes
    if 0 in (*batch, m, n):
        views = {key: View(names[key], 0, 0) for key in slots}
        return (_product(0, m, n, k, views, num_d),), "rc", "c" if int4 else "cr"
    done = collapse(batch, m, slots, foldable=True, limit=MAX_GROUPS)
    m = done.m
    a, b, c = done.slots["a"], done.slots["b"], done.slots["out"]
    a_layouts = layouts_of(m, k, a.row_stride, a.col_stride, "r") if k else "rc"
    b_layouts = layouts_of(k, n, b.row_stride, b.col_stride, "c") if k and packing is None else "cr"
    if int4:  # contiguous columns, which has been checked
        b_layouts = "c"
    for key, found in (("a", a_layouts), ("b", b_layouts)):
        if not found:
            raise refuse(
                f"{names[key]} has unit stride in neither of its last two dimensions",
                f"{names[key]}.strides",
                (done.slots[key].row_stride, done.slots[key].col_stride),
                "unit_stride",
                "make a contiguous copy of it",
            )
    if n > 1 and c.col_stride != 1:
        raise refuse(
            f"{names['out']} is not row-major",
            f"{names['out']}.strides",
            out.strides,
            "output_layout",
            "give an output with unit stride in its last dimension, or compute the transposed product (b.T times a.T)",
        )
    products = []
    for offsets in done.offsets:
        views = {
            key: View(
                names[key],
                item.row_stride if (k if key == "b" else n if key in ("scale_b", "zero_b") else m) > 1 else 0,
                item.col_stride,
                item.batch_strides[0],
                offsets[key],
            )
            for key, item in done.slots.items()
        }
        products.append(_product(done.size, m, n, k, views, num_d))
    return tuple(products), a_layouts, b_layouts


def _product(batch: int, m: int, n: int, k: int, views: Mapping[str, View], num_d: int) -> Product:
    return Product(
        m=m,
        n=n,
        k=k,
        batch=batch,
        a=views["a"],
        b=views["b"],
        out=views["out"],
        bias=views.get("bias"),
        d=tuple(views[f"d{index}"] for index in range(num_d)),
        scale_a=views.get("scale_a"),
        scale_b=views.get("scale_b"),
        zero_b=views.get("zero_b"),
    )

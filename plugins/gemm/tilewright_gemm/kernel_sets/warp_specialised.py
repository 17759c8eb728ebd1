"""Kernel sets of the warp-specialised pipeline: the default kernels, and its whole space."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_gemm.candidates.warp_specialised import INSTRUCTION_BYTES, PIPELINE, WS_SHAPES, Shape
from tilewright_gemm.config.choices import offered, table_key
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.vocabulary import LAYOUTS, Binary, Epilogue, Reduction, ScaleA, ScaleB, Unary
from tilewright_kit.kernel_sets.declare import ANY, Declaration, DeferredDeclarations, KernelSet, declare
from tilewright_kit.tiles.footprint.workgroup import stages_of
from tilewright_kit.types.dtypes import DType

__all__ = ["SWEEP_HOPPER", "TUNE_HOPPER", "WS_DEFAULTS"]

_HALVES = [DType.FP16, DType.BF16]
_EIGHT = ((DType.FP8, ""), (DType.FP8, "bf8"), (DType.BF8, "fp8"), (DType.BF8, ""))
_ALL_LAYOUTS = (0, 3, 7, 15, 18)
"""Places in ``WS_SHAPES``."""
_BIG = Shape((128, 256), (2, 1), (2, 1))
_SQUARE = Shape((128, 128), (2, 1), (2, 1))


def _ws(shape: Shape, **fields: Any) -> Declaration[GemmConfig]:
    """Kernels of one shape; ``dtype_a`` is one type, or a list of types of one size."""
    first = fields.get("dtype_a", DType.FP16)
    shaped = shape.fields(first[0] if isinstance(first, list) else first)
    return declare(GemmConfig, **{**shaped, **fields})


def _swapped(rows: int, waves: int, k_rows: int = 1) -> Shape:
    return Shape((rows, 64 * waves), (1, waves), swapped=True, k_rows=k_rows)


def _defaults() -> Iterator[Declaration[GemmConfig]]:
    """Halves in every layout; 8-bit operands; decoding; K shared; every fused step somewhere."""
    for place, shape in enumerate(WS_SHAPES):
        layouts = list(LAYOUTS) if place in _ALL_LAYOUTS else "rcr"
        yield _ws(shape, dtype_a=_HALVES, layout=layouts)
    for rows in (8, 16, 32, 64):
        for waves in (1, 2):
            yield _ws(_swapped(rows, waves, 2), dtype_a=_HALVES, split_k=[1, 2, 4], persistent=False)
            for slices in (2, 4):
                shared = {"split_k": slices, "cluster": (1, 1, slices), "persistent": False}
                yield _ws(_swapped(rows, waves, 2), dtype_a=_HALVES, **shared)
    yield _ws(_swapped(128, 2), dtype_a=_HALVES, split_k=[1, 2])
    yield _ws(_swapped(64, 2), dtype_a=_HALVES, layout=["rrr", "crr", "ccr"])
    yield _ws(_SQUARE, dtype_a=_HALVES, split_k=[2, 4])
    yield _ws(Shape((64, 128), (1, 1), pingpong=True), dtype_a=_HALVES, split_k=2)
    for shape in (Shape((128, 256), (2, 1)), Shape((256, 128), (2, 1)), _SQUARE):
        yield _ws(shape, dtype_a=_HALVES, reduction=Reduction.LINEAR)
    for dtype, other in _EIGHT:
        for shape in (_SQUARE, Shape((128, 192), (2, 1), (2, 1)), _swapped(16, 1), _swapped(64, 2)):
            yield _ws(shape, dtype_a=dtype, dtype_b=other, promote=4, dtype_c=["", "bf16"])
    for shape in WS_SHAPES:
        sums = shape.tile[0] * shape.tile[1] // (128 * shape.wave[0] * shape.wave[1])
        # Promotion takes every sum twice.
        yield _ws(shape, dtype_a=DType.FP8, dtype_c="bf16", promote=4 * shape.k_rows if sums <= 96 else 0)
        if sums <= 128:
            yield _ws(shape, dtype_a=DType.INT8)
    yield _ws(_SQUARE, dtype_a=DType.FP8, promote=4, dtype_c="bf16", scale_a=ScaleA.ROW, scale_b=ScaleB.COLUMN)
    yield _ws(_SQUARE, dtype_a=DType.FP8, promote=4, dtype_c="bf16", scale_a=ScaleA.TENSOR, scale_b=ScaleB.TENSOR)
    yield _ws(_SQUARE, dtype_a=DType.INT8, dtype_c="fp16", scale_a=ScaleA.ROW, scale_b=ScaleB.COLUMN, bias="fp32")
    yield _ws(_swapped(16, 1), dtype_a=DType.INT8, split_k=[1, 2])
    for unary in Unary:
        yield _ws(_BIG, dtype_a=DType.BF16, bias="bf16", unary=unary)
    for shape in (_BIG, _SQUARE, _swapped(16, 2)):
        yield _ws(shape, dtype_a=DType.BF16, bias="fp32", unary=Unary.GELU)
        yield _ws(shape, dtype_a=DType.BF16, binary=[Binary.MULTI_D_ADD, Binary.MULTI_D_MULTIPLY], num_d_tensors=[1, 2])
        yield _ws(shape, dtype_a=DType.BF16, dtype_c="fp32")
        yield _ws(shape, dtype_a=_HALVES, epilogue=Epilogue.DEFAULT)
        yield _ws(shape, dtype_a=_HALVES, batched=True)
        yield _ws(shape, dtype_a=_HALVES, grouped=True)


def _offered(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterable[Any] | None:
    """Values that ``ANY`` stands for in the sweep: everything that the arch states."""
    pipeline = str(partial.get("pipeline", ""))
    if pipeline not in arch.pipelines or not arch.pipeline(pipeline).register_splits:
        return offered(field, arch, partial)
    offer = arch.pipeline(pipeline)
    if field == "cluster":
        return [cluster for cluster in offer.clusters if cluster[2] == 1]
    if field == "wave":
        return [wave for wave in arch.waves if offer.register_split(wave[0] * wave[1] * wave[2])]
    if field == "tile":
        return list(_tiles(arch, partial))
    if field == "warp_tile":
        return [_warp_tile(partial)]
    if field == "stages":
        # As many as fit has the name of zero.
        fitting = stages_of(GemmConfig(**{**partial, "stages": 0}), arch)
        return (0, *range(offer.min_stages, fitting))
    return offered(field, arch, partial)


def _tiles(arch: ArchSpec, partial: Mapping[str, Any]) -> Iterator[Triple]:
    size = DType(partial.get("dtype_a", DType.FP16)).bytes
    widths = sorted({max(tile[:2]) for tile in arch.warp_tiles_for(table_key("fp16"), PIPELINE)} | {8, 16, 24, 32, 48})
    for k, rows, columns in itertools.product((64, 128) if size > 1 else (128,), (64, 128, 192, 256), widths):
        yield (columns, rows, k) if partial.get("transpose_c") else (rows, columns, k)


def _warp_tile(partial: Mapping[str, Any]) -> Triple:
    """The instruction that a tile and its waves imply."""
    (m, n, _), wave = partial["tile"], partial["wave"]
    deep = INSTRUCTION_BYTES // DType(partial.get("dtype_a", DType.FP16)).bytes
    return (m // wave[0], 64, deep) if partial.get("transpose_c") else (64, n // wave[1], deep)


def _may_be_valid(partial: Mapping[str, Any], arch: ArchSpec) -> bool:
    """A quick look: the tile is a whole number of instructions, and so is what each workgroup loads for its cluster."""
    tile, wave, cluster = partial.get("tile"), partial.get("wave"), partial.get("cluster")
    if partial.get("pipeline") not in arch.pipelines:
        return False
    if tile is None or wave is None:
        return True
    rows = 1 if partial.get("transpose_c") else 0
    if tile[rows] % (64 * wave[rows]) or tile[1 - rows] % (8 * wave[1 - rows]):
        return False
    return cluster is None or not (tile[0] % (8 * cluster[1]) or tile[1] % (8 * cluster[0]))


def _space(**fields: Any) -> Iterator[Declaration[GemmConfig]]:
    base = {"pipeline": PIPELINE, "persistent": True, "tile": ANY, "wave": ANY, "warp_tile": ANY, "cluster": ANY}
    base |= {"epilogue": [Epilogue.CSHUFFLE, Epilogue.DEFAULT], "stages": ANY}
    for more in ({"dtype_a": DType.FP16}, {"dtype_a": DType.FP8, "promote": [0, 4]}):
        yield declare(GemmConfig, **{**base, **fields, **more})


def _good(shapes: Iterable[Shape], **fields: Any) -> Iterator[Declaration[GemmConfig]]:
    """Shapes for a first look at a device: an hour of measuring rather than a day."""
    for shape in shapes:
        for dtype, promote in ((DType.FP16, [0]), (DType.FP8, [0, 4 * shape.k_rows])):
            stays = [True] if shape.pingpong else [False] if "cluster" in fields else [True, False]
            yield _ws(shape, dtype_a=dtype, promote=promote, persistent=stays, **fields)


def _tuned_shapes() -> Iterator[Shape]:
    clusters = ((1, 1), (2, 1), (1, 2))
    for cluster, n in itertools.product(clusters, (64, 128, 192, 256)):
        for m in (128, 256):
            yield Shape((m, n), (2, 1), cluster)
        yield Shape((64, n), (1, 2) if n >= 128 else (1, 1), cluster)
        for m in (64, 128):
            yield Shape((m, n), (1, 1), cluster, pingpong=True)
    for rows, waves, k_rows in itertools.product((8, 16, 24, 32, 48, 64, 128), (1, 2), (1, 2)):
        for cluster in ((1, 1), (1, 2)):
            yield Shape((rows, 64 * waves), (1, waves), cluster, swapped=True, k_rows=k_rows)


def _tuned() -> Iterator[Declaration[GemmConfig]]:
    yield from _good(_tuned_shapes(), split_k=[1, 2, 4, 8])
    for slices in (2, 3, 4, 8):
        yield from _good(_shared_shapes(), split_k=slices, cluster=(1, 1, slices))


def _shared_shapes() -> Iterator[Shape]:
    """Shapes that pay when the workgroups of a cluster along k share them."""
    for rows, waves, k_rows in itertools.product((8, 16, 24, 32, 48, 64), (1, 2), (1, 2)):
        yield _swapped(rows, waves, k_rows)
    for tile, wave in (((128, 128), (2, 1)), ((64, 128), (1, 2)), ((128, 64), (2, 1)), ((64, 64), (1, 1))):
        yield Shape(tile, wave)


TUNE_HOPPER = KernelSet(
    "tune_hopper",
    "The shapes of Hopper's warp-specialised pipeline that are fast on some problem, K shared in the usual ways",
    DeferredDeclarations(_tuned),
    offered,
)
SWEEP_HOPPER = KernelSet(
    "sweep_hopper",
    "Every tile, cluster, number of stages and schedule of Hopper's warp-specialised pipeline",
    (
        *_space(scheduler="cooperative"),
        *_space(scheduler="pingpong", num_wave_groups=2, wave=(1, 1, 1)),
        *_space(scheduler="cooperative", transpose_c=True),
    ),
    _offered,
    _may_be_valid,
)
"""In fp16 and fp8, rcr: whoever tunes puts a problem's types and layout in their place, and what then fits is tried."""


WS_DEFAULTS = DeferredDeclarations(_defaults)

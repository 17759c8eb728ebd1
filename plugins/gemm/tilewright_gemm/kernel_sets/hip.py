"""Kernel sets of AMD GPUs: the essential one, which is built and checked for every arch, and the default one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_gemm.candidates.hip import HIP_SHAPES
from tilewright_gemm.config.choices import offered, table_key
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.config.pack_b import PackBConfig
from tilewright_gemm.vocabulary import LAYOUTS, Binary, Epilogue, ScaleA, ScaleB, Unary
from tilewright_kit.kernel_sets.declare import ANY, Declaration, DeferredDeclarations, KernelSet, declare
from tilewright_kit.tiles.choices import warp_tile_for
from tilewright_kit.types.dtypes import DType

__all__ = ["ESSENTIAL", "HIP_DEFAULTS", "packing_kernels", "preferred"]

Archs = Callable[[ArchSpec], bool]
Declarations = Iterator[Declaration[GemmConfig]]


def _hip(arch: ArchSpec) -> bool:
    return arch.kind == "hip"


def _cdna(arch: ArchSpec) -> bool:
    return arch.kind == "hip" and arch.wave_size == 64


def _rdna(arch: ArchSpec) -> bool:
    return arch.kind == "hip" and arch.wave_size == 32


def _family(name: str) -> Archs:
    return lambda arch: arch.family == name


_HALVES = [DType.FP16, DType.BF16]
_EIGHT = ((DType.FP8, ""), (DType.FP8, "bf8"), (DType.BF8, "fp8"), (DType.BF8, ""))
_LINE_BYTES = 64
"""Bytes of a tile along k that the pipelines of these sets stage at a time."""

_FEW = 32
"""Rows or columns of tiles for problems that memory decides."""

_SUMS, _LANES = 128, 64
"""Sums of a lane, times lines of a tile along k, beyond which a kernel takes up to twice as long to compile for a loop
that is no faster: fewer sums, and shorter lines, keep the matrix units as busy.
"""


_LOOPS = (
    (("rcr", "rrr"), ("comp_async", "compv4", "compv3"), _SUMS, _SUMS),
    (("crr", "ccr"), ("compv4", "compv3"), _SUMS // 2, _SUMS // 4),
)
"""Layouts, the pipelines of their usual tiles, and the most sums times lines where waves have 64 lanes, and 32. With A
in columns ``comp_async`` is ``compv4``, and turning A takes registers: the larger tiles are left to planners.
"""


def preferred(field: str, arch: ArchSpec, partial: Mapping[str, Any]) -> Iterable[Any] | None:
    """``offered``, but of the warp tiles of an AMD GPU only the one that suits a tile and its waves best."""
    if field != "warp_tile" or arch.kind != "hip":
        return offered(field, arch, partial)
    pipeline, tile, wave = partial["pipeline"], partial["tile"], partial["wave"]
    if pipeline not in arch.pipelines:
        return ()
    key = table_key(DType(partial.get("dtype_a", DType.FP16)).value, str(partial.get("dtype_b", "")))
    found = warp_tile_for(
        arch.warp_tiles_for(key, pipeline), (tile[0] // max(wave[0], 1), tile[1] // max(wave[1], 1)), tile[2]
    )
    return () if found is None else (found,)


def _kernels(
    archs: Archs, tile: tuple[int, int], wave: tuple[int, int], lines: int = 1, **fields: Any
) -> Declaration[GemmConfig]:
    """Kernels of one shape. ``dtype_a`` is one type, or types of one size; ``lines``: length of the tile along k."""
    first = fields.setdefault("dtype_a", DType.FP16)
    size = (first[0] if isinstance(first, list) else first).bytes
    shaped = {"tile": (*tile, lines * _LINE_BYTES // size), "wave": (*wave, 1), "warp_tile": ANY}
    return declare(GemmConfig, **{**shaped, **fields}).where(archs)


def _types(archs: Archs, wave: tuple[int, int]) -> Declarations:
    """Every type that the arch multiplies, and every layout."""
    every: dict[str, Any] = {"layout": list(LAYOUTS), "pipeline": "compv4"}
    for dtype in (DType.FP16, DType.BF16, DType.FP32, DType.INT8):
        yield _kernels(archs, (128, 128), wave, dtype_a=dtype, **every)
    for dtype, other in _EIGHT:
        # Where the pair of types has an instruction.
        yield _kernels(archs, (128, 128), wave, dtype_a=dtype, dtype_b=other, **every)


def _steps(archs: Archs, wave: tuple[int, int]) -> Declarations:
    """Epilogues, fused steps, and the ways to distribute work."""
    base: dict[str, Any] = {"pipeline": "compv4"}
    yield _kernels(archs, (128, 64), wave, epilogue=Epilogue.DEFAULT, **base)
    yield _kernels(archs, (128, 64), wave, dtype_c="fp32", bias="fp32", unary=Unary.GELU, **base)
    multi_d: dict[str, Any] = {"binary": Binary.MULTI_D_ADD, "num_d_tensors": 2, "unary": Unary.RELU}
    yield _kernels(archs, (128, 64), wave, dtype_a=DType.BF16, **multi_d, **base)
    scales: dict[str, Any] = {"scale_a": ScaleA.ROW, "scale_b": ScaleB.COLUMN}
    yield _kernels(archs, (128, 64), wave, dtype_a=DType.INT8, dtype_c="fp16", **scales, **base)
    yield _kernels(archs, (128, 64), wave, split_k=4, **base)
    yield _kernels(archs, (128, 64), wave, batched=True, **base)
    yield _kernels(archs, (128, 64), wave, grouped=True, **base)
    yield _kernels(archs, (128, 64), wave, persistent=True, **base)


def _essential() -> Declarations:
    # 16 waves, of which four share a SIMD and hide each other's waits.
    yield _kernels(_family("cdna4"), (256, 256), (4, 4), pipeline=["compv4", "comp_async"])
    # 16 by 19 tiles of 4096 x 4096: one for each of the 304 units of an MI300X. Strips of results have no room there.
    yield _kernels(_cdna, (256, 224), (4, 1), pipeline="compv4", epilogue=Epilogue.DEFAULT)
    yield _kernels(_cdna, (256, 128), (2, 2), pipeline=["compv3", "compv4", "comp_async"])
    yield _kernels(_cdna, (64, 64), (2, 2), lines=2, pipeline="compv3")
    yield _kernels(_cdna, (16, 64), (1, 4), lines=2, pipeline="mem", scheduler=["intrawave", "interwave"])
    shuffled: dict[str, Any] = {"pipeline": "preshufflev2", "preshuffle": True}
    yield _kernels(_cdna, (128, 128), (2, 2), lines=2, dtype_a=DType.FP16, **shuffled)
    yield _kernels(_cdna, (128, 128), (2, 2), lines=2, dtype_a=DType.FP8, **shuffled)
    yield _kernels(_cdna, (64, 64), (1, 4), pipeline="compv3", warp_tile=(64, 4, 16))
    yield _kernels(_cdna, (64, 64), (4, 1), pipeline="compv3", warp_tile=(4, 64, 16))
    yield from _types(_cdna, (2, 2))
    yield from _steps(_cdna, (2, 2))
    yield _kernels(_rdna, (128, 256), (2, 4), pipeline="compv4")
    yield _kernels(_rdna, (128, 128), (4, 2), pipeline=["compv3", "compv4"])
    yield _kernels(_rdna, (64, 64), (4, 2), lines=2, pipeline="compv3")
    yield _kernels(_rdna, (16, 128), (1, 8), lines=2, pipeline="mem", scheduler=["intrawave", "interwave"])
    yield from _types(_rdna, (2, 4))
    yield from _steps(_rdna, (4, 2))


def packing_kernels() -> Iterator[Declaration[PackBConfig]]:
    """Packing of B in panels of 32 and of 16 columns."""
    for tile, wave in (((128, 128), (2, 2)), ((64, 64), (4, 1))):
        for dtypes, depth in ((_HALVES, 64), ([DType.INT8, DType.FP8, DType.BF8], 128)):
            yield declare(
                PackBConfig,
                dtype_a=dtypes,
                layout=["rcr", "rrr"],
                pipeline="preshufflev2",
                preshuffle=True,
                tile=(*tile, depth),
                wave=(*wave, 1),
                warp_tile=ANY,
            ).where(_cdna)


ESSENTIAL = KernelSet(
    "essential",
    "AMD GPUs: every type, layout, pipeline, epilogue and way to distribute work, in the usual tiles",
    DeferredDeclarations(_essential),
    preferred,
)


def _defaults() -> Declarations:
    """The essential kernels, and the shapes that are considered for problems, in the usual types."""
    yield from _essential()
    # For the tiles, not for the loop: see the essential kernels.
    wide: dict[str, Any] = {"dtype_a": _HALVES, "layout": ["rcr", "rrr"], "epilogue": Epilogue.DEFAULT}
    yield _kernels(_family("cdna3"), (256, 224), (4, 1), pipeline="compv4", **wide)
    for shape in HIP_SHAPES:
        sums = shape.tile[0] * shape.tile[1] // (shape.wave[0] * shape.wave[1] * _LANES)
        for lines in (1, 2):
            if sums * lines > _SUMS:
                continue
            for dtypes in ([DType.FP32], _HALVES, [DType.INT8], [DType.FP8]):
                for layouts, pipelines, most, most_rdna in _LOOPS:
                    if sums * lines > most:
                        continue
                    yield _kernels(
                        _hip if sums * lines <= most_rdna else _cdna,
                        shape.tile,
                        shape.wave,
                        lines=lines,
                        dtype_a=dtypes,
                        layout=list(layouts),
                        pipeline=["mem"] if min(shape.tile) <= _FEW else list(pipelines),
                    )


HIP_DEFAULTS = DeferredDeclarations(_defaults)

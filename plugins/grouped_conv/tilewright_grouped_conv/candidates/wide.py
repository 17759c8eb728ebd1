"""The wide space of convolution kernels on archs whose copy engine gathers pixels: every tile, schedule and division of
the reduction that may be valid, beside the portable products. Rules say which are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.candidates.im2col import WsShape
from tilewright_grouped_conv.candidates.shapes import VECTOR_BYTES, gpu_shapes
from tilewright_grouped_conv.config.config import CONFIGS, ConvConfig
from tilewright_grouped_conv.footprint.im2col import LINE_BYTES
from tilewright_grouped_conv.vocabulary import Direction, Specialization, layout_of
from tilewright_kit.config.rules import RuleBook
from tilewright_kit.tiles.choices import table_key
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["wide_algorithms"]

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_WEIGHT_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 132)
"""Slices: few enough that kernels are shared by many problems."""
_ROWS, _COLUMNS = (64, 128, 192, 256), (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_WAVES = ((1, 1), (2, 1), (3, 1), (1, 2))


def wide_algorithms(
    direction: Direction, ndim: int, dtype: DType, out: DType, arch: ArchSpec, rules: RuleBook[ConvConfig]
) -> Iterator[ConvConfig]:
    """Valid kernels with channels last and whole vectors, without fused steps, in a fixed order."""
    splits = _WEIGHT_SPLITS if direction is Direction.BACKWARD_WEIGHT else _SPLITS
    for base in (*_gathered(direction, ndim, dtype, out), *_portable(direction, ndim, dtype, out, arch)):
        if not rules.allows(base, arch):
            continue
        yield base
        cut = base.replace(split_k=2)
        if rules.allows(cut, arch):
            yield from (base.replace(split_k=count) for count in splits[1:])
        if direction is Direction.BACKWARD_WEIGHT and rules.allows(cut.replace(two_stage=True), arch):
            yield from (base.replace(split_k=count, two_stage=True) for count in splits[1:])


def _gathered(direction: Direction, ndim: int, dtype: DType, out: DType) -> Iterator[ConvConfig]:
    """Pixels that the copy engine gathers; the weights' gradient may take two lines of pixels in a step."""
    line = LINE_BYTES // out.bytes
    for rows, columns, waves in itertools.product(_ROWS, _COLUMNS, _WAVES):
        for pingpong in (False, True):
            if rows % (64 * waves[0]) or columns % waves[1] or (pingpong and waves != (1, 1)):
                continue
            fields = WsShape((rows, columns), waves, pingpong).fields(dtype, out)
            config = CONFIGS[direction](layout=layout_of(ndim), ndim=ndim, dtype_out=out.value, **fields)
            if config.warp_tile[1] % line:
                config = config.replace(epilogue=Epilogue.DEFAULT)
            yield config
            if direction is Direction.BACKWARD_WEIGHT:
                yield config.replace(tile=(*config.tile[:2], 2 * config.tile[2]))


def _portable(direction: Direction, ndim: int, dtype: DType, out: DType, arch: ArchSpec) -> Iterator[ConvConfig]:
    """Products of the portable pipelines; of a pointwise one also that of matrices."""
    key = table_key(dtype.value, dtype.value)
    vectors = (VECTOR_BYTES // dtype.bytes, VECTOR_BYTES // dtype.bytes, VECTOR_BYTES // out.bytes)
    base = CONFIGS[direction](dtype_in=dtype, dtype_out=out.value, layout=layout_of(ndim), ndim=ndim)
    for fields, matrix in itertools.product(
        tuple(gpu_shapes(arch, dtype, key, direction)),
        (False,) if direction is Direction.BACKWARD_WEIGHT else (False, True),
    ):
        offer = arch.pipeline(fields["pipeline"])
        yield base.replace(
            **fields, scheduler=offer.schedulers[0], epilogue=Epilogue(offer.epilogues[0]), vector_sizes=vectors,
            explicit_gemm=matrix,
            specialization=Specialization.FILTER1X1_STRIDE1_PAD0 if matrix else Specialization.DEFAULT,
        )  # fmt: skip

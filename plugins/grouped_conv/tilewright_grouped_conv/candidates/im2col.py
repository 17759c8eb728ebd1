"""Candidates that gather pixels by the copy engine, before the rules and the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tilewright_grouped_conv.config.config import CONFIGS, IM2COL_PIPELINE, ConvConfig
from tilewright_grouped_conv.footprint.im2col import COPY_BYTES, LINE_BYTES, im2col_mismatches, im2col_product
from tilewright_grouped_conv.problem.problem import ConvProblem
from tilewright_grouped_conv.vocabulary import Direction, layout_of
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.cost.units import units_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["COLUMN_SHAPES", "ROW_SHAPES", "WsShape", "im2col_algorithms"]

_SIDE, _DEPTH_BYTES = 64, 32
"""Rows of an instruction, and the bytes along k that it takes."""
_LEAST_CHANNELS = 16
"""Channels of which a line of 64 is mostly zeros."""
_LEAST_STEPS, _MOST_SLICES = 4, 132
_FULL = 0.85
"""Part of the device from which on tiles of pixels need not be split."""


class WsShape(NamedTuple):
    """A tile, and the waves that share it; ``pingpong``: two waves with a tile each."""

    tile: tuple[int, int]
    wave: tuple[int, int]
    pingpong: bool = False

    def fields(self, dtype: DType, out: DType) -> dict[str, Any]:
        """The fields of a configuration."""
        (m, n), size = self.tile, dtype.bytes
        vectors = (COPY_BYTES // size, COPY_BYTES // size, COPY_BYTES // out.bytes)
        return {
            "dtype_in": dtype,
            "pipeline": IM2COL_PIPELINE,
            "scheduler": "pingpong" if self.pingpong else "cooperative",
            "num_wave_groups": 2 if self.pingpong else 1,
            "tile": (m, n, LINE_BYTES // size),
            "wave": (*self.wave, 1),
            "warp_tile": (_SIDE, n // self.wave[1], _DEPTH_BYTES // size),
            "vector_sizes": vectors,
        }


ROW_SHAPES = (
    WsShape((128, 128), (1, 1), True),
    WsShape((128, 256), (2, 1)),
    WsShape((256, 128), (2, 1)),
    WsShape((128, 192), (1, 1), True),
    WsShape((192, 192), (3, 1)),
    WsShape((64, 256), (1, 1), True),
    WsShape((256, 64), (2, 1)),
    WsShape((192, 64), (1, 1), True),
    WsShape((128, 64), (1, 1), True),
    WsShape((64, 128), (1, 1), True),
    WsShape((64, 64), (1, 1), True),
)
"""Tiles for forward and the image's gradient, whose rows are pixels, the preferred first."""

COLUMN_SHAPES = (
    WsShape((128, 128), (2, 1)),
    WsShape((128, 192), (2, 1)),
    WsShape((128, 192), (1, 1), True),
    WsShape((128, 128), (1, 1), True),
    WsShape((128, 256), (2, 1)),
    WsShape((256, 128), (2, 1)),
    WsShape((192, 192), (3, 1)),
    WsShape((64, 256), (1, 1)),
    WsShape((64, 192), (1, 1)),
    WsShape((128, 64), (1, 1), True),
    WsShape((64, 64), (1, 1), True),
)
"""Tiles for the weights' gradient, whose columns are taps and channels."""


def im2col_algorithms(problem: ConvProblem, device: DeviceInfo) -> Iterator[ConvConfig]:
    """Configurations with the algorithm set, the signature not."""
    geometry, weights = problem.geometry, problem.direction is Direction.BACKWARD_WEIGHT
    gathered = geometry.kg if problem.direction is Direction.BACKWARD_DATA else geometry.cg
    if problem.dtype_in.bytes != 2 or gathered < _LEAST_CHANNELS:
        return
    phases = problem.phases(False)
    if len(phases) != 1 or problem.accumulate:
        return
    for shape in COLUMN_SHAPES if weights else ROW_SHAPES:
        config = CONFIGS[problem.direction](
            layout=layout_of(problem.ndim), ndim=problem.ndim, **shape.fields(problem.dtype_in, problem.dtype_out)
        )
        product = im2col_product(problem, phases[0], config)
        if shape.tile[0] >= 2 * max(product.m, _SIDE) or shape.tile[1] >= 2 * max(product.n, _SIDE):
            continue
        if any(item.rule == "im2col_store" for item in im2col_mismatches(problem, config)):
            config = config.replace(epilogue=Epilogue.DEFAULT)
        for split in _splits(problem, product.tiles(config), product.steps, shape, device):
            yield config.replace(split_k=split)


def _splits(problem: ConvProblem, tiles: int, steps: int, shape: WsShape, device: DeviceInfo) -> tuple[int, ...]:
    """Slices of the reduction: what the caller asked for; else none, and as many as fill the device once or more."""
    if problem.split_k:
        return (problem.split_k,)
    units = units_of(device) * (2 if shape.pingpong else 1)
    weights = problem.direction is Direction.BACKWARD_WEIGHT
    if not tiles or (not weights and tiles >= units * _FULL):
        return (1,)
    most = min(steps // _LEAST_STEPS, _MOST_SLICES)
    found = {min(turns * units // tiles, most) for turns in ((1, 2, 3) if weights else (1,))}
    return tuple(sorted({1, *(split for split in found if split > 1)}))

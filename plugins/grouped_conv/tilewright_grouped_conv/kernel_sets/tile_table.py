"""The default tile table of AMD GPUs, and its pairs of pipeline and variant.

On archs whose tables lack a row's waves or warp tile the rules drop the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewright_grouped_conv.config.config import ConvConfig, Triple
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.kernel_sets.declare import ANY, Declaration, declare
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["COMPV4_TILES", "TILES", "table_fields", "table_tiles"]

TILES: tuple[tuple[Triple, Triple, Triple], ...] = (
    ((16, 64, 64), (1, 4, 1), (16, 16, 16)),
    ((32, 64, 64), (2, 2, 1), (16, 16, 16)),
    ((64, 64, 64), (4, 1, 1), (16, 16, 16)),
    ((32, 128, 64), (1, 4, 1), (32, 32, 16)),
    ((64, 128, 64), (2, 2, 1), (32, 32, 16)),
    ((128, 128, 64), (4, 4, 1), (32, 32, 16)),
    ((16, 64, 128), (1, 4, 1), (16, 16, 32)),
    ((32, 64, 128), (2, 2, 1), (16, 16, 32)),
    ((64, 64, 128), (4, 1, 1), (16, 16, 32)),
    ((128, 64, 128), (8, 2, 1), (16, 16, 32)),
)
"""Tile, waves and warp tile."""
COMPV4_TILES = tuple(row for row in TILES if row[0][1] == 64 and row[1] != (8, 2, 1))
"""Those that ``compv4`` takes, with twice as much along k."""


def table_fields(direction: Direction) -> Iterator[dict[str, Any]]:
    """Fields of every kernel of the default rule set: ``compv3`` and ``compv4`` forward, ``compv3`` and ``mem`` for the
    gradients, those of the weights in one stage and in two.
    """
    if direction is Direction.FORWARD:
        rows = [("compv3", Epilogue.CSHUFFLE, row) for row in TILES]
        rows += [("compv4", Epilogue.CSHUFFLE, (_deeper(row[0]), *row[1:])) for row in COMPV4_TILES]
    else:
        rows = [("compv3", Epilogue.CSHUFFLE, row) for row in TILES]
        rows += [("mem", Epilogue.DEFAULT, row) for row in TILES]
    for pipeline, epilogue, (tile, wave, warp_tile) in rows:
        fields = {"pipeline": pipeline, "epilogue": epilogue, "tile": tile, "wave": wave, "warp_tile": warp_tile}
        yield fields
        if direction is Direction.BACKWARD_WEIGHT:
            yield {**fields, "two_stage": True}


def table_tiles(config: type[ConvConfig]) -> Iterator[Declaration[ConvConfig]]:
    """Declarations of the table, in half precision. CUDA devices have warp tiles and pipelines of their own, for the
    same tiles.
    """
    for dtype in (DType.FP16, DType.BF16):
        for fields in table_fields(config.direction):
            yield declare(config, dtype_in=dtype, **fields).for_kinds("hip")
        for tile, wave, _ in TILES:
            shape: dict[str, Any] = {"tile": tile, "wave": wave, "warp_tile": ANY, "pipeline": ["compv3", "compv4"]}
            yield declare(config, dtype_in=dtype, **shape).for_kinds("cuda")


def _deeper(tile: Triple) -> Triple:
    return tile[0], tile[1], 2 * tile[2]

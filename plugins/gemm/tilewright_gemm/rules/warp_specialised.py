"""Rules on pipelines with a bulk copy engine and warpgroup instructions.

A workgroup copies boxes of A and B with the engine and multiplies them with instructions of 64 rows and a flexible
number of columns; ``transpose_c`` swaps the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tilewright_arch import ArchSpec, BulkCopy
from tilewright_gemm.config.config import GemmConfig
from tilewright_gemm.vocabulary import Epilogue
from tilewright_kit.config.rules import Violation
from tilewright_kit.tiles.footprint.workgroup import consumers, is_specialised, size_of
from tilewright_kit.tiles.tables import SIDE, columns_of, nearest, rows_of, usable_warp_tiles, with_extent

__all__ = [
    "copy_box",
    "mn_major",
    "one_instruction_wide",
    "register_split",
    "stored_lines",
    "swapped_warp_tile",
    "swizzled_rows",
]


def _copies(config: GemmConfig, arch: ArchSpec) -> BulkCopy | None:
    """The bulk copy engine if this kernel uses it, with sizes that can be looked at."""
    sizes = (*config.tile, *config.wave, *config.warp_tile, *config.cluster)
    return arch.bulk_copy if is_specialised(config, arch) and min(sizes) > 0 else None


def swapped_warp_tile(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: the fixed side of the warp tile lies along m, with ``transpose_c`` along n."""
    if not is_specialised(config, arch) or config.warp_tile[rows_of(config)] == SIDE:
        return
    fits = usable_warp_tiles(config, arch)
    if fits:
        m, n, k = config.warp_tile
        fix = {"warp_tile": nearest((n, m, k), fits)}
        reason = f"the instruction has {SIDE} {'columns' if config.transpose_c else 'rows'} in this orientation"
        yield Violation("swapped_warp_tile", "warp_tile", config.warp_tile, reason, fix)


def register_split(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: the register file is divided for that many consumers, and with ``transpose_c`` they lie along n."""
    if not is_specialised(config, arch):
        return
    offer, wave, pingpong = arch.pipeline(config.pipeline), config.wave, config.scheduler == "pingpong"
    known = offer.register_split(consumers(config)) is not None
    if known and (wave == (1, 1, 1) if pingpong else wave[2] == 1 and (wave[0] == 1 or not config.transpose_c)):
        return
    if pingpong:
        allowed, reason = [(1, 1, 1)], "in the pingpong schedule each wave group is one wave"
    else:
        counts = [split.consumers for split in offer.register_splits]
        allowed = [
            item for item in arch.waves if math.prod(item) in counts and (item[0] == 1 or not config.transpose_c)
        ]
        reason = f"registers are divided for {', '.join(map(str, counts))} consumers"
        reason += ", along n" if config.transpose_c else ""
    if wave not in allowed and allowed:
        fix: dict[str, object] = {"wave": nearest(wave, allowed)}
        yield Violation("register_split", "wave", wave, reason, fix)


def one_instruction_wide(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: along the flexible side a wave's part of the tile is one instruction wide."""
    if _copies(config, arch) is None:
        return
    axis = columns_of(config)
    wanted = config.wave[axis] * config.warp_tile[axis]
    if config.tile[axis] != wanted:
        reason = f"along {'mn'[axis]} each wave has one warp tile, so the tile has {wanted}"
        yield Violation(
            "one_instruction_wide", "tile", config.tile, reason, {"tile": with_extent(config.tile, axis, wanted)}
        )


def swizzled_rows(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: a tile's rows along k fill whole rows of the swizzle pattern."""
    copies = _copies(config, arch)
    if copies is None:
        return
    unit = copies.swizzle_bytes // size_of(config.a)
    if config.tile[2] % unit or config.tile[2] > copies.max_box:
        fitting = min(-(-config.tile[2] // unit) * unit, copies.max_box // unit * unit)
        reason = f"tile_k is a multiple of {unit} up to {copies.max_box}: whole rows of {copies.swizzle_bytes} bytes"
        yield Violation("swizzled_rows", "tile", config.tile, reason, {"tile": with_extent(config.tile, 2, fitting)})


def mn_major(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: 8-bit operands lie along k; others may lie along m or n, then in panels as wide as the swizzle."""
    copies = _copies(config, arch)
    if copies is None or len(config.layout) != 3:
        return
    along = [axis for axis, letter in ((0, config.layout[0] == "c"), (1, config.layout[1] == "r")) if letter]
    if along and size_of(config.a) == 1:
        reason = "the matrix instruction reads 8-bit operands along k only: layout rcr"
        fix = _portable(arch)
        yield Violation("mn_major", "layout", config.layout, reason, fix)
        return
    panel = copies.swizzle_bytes // size_of(config.a)
    for axis in along:
        unit = panel * config.cluster[1 - axis]
        # A wave's own columns begin where a panel begins.
        own = config.warp_tile[axis] % panel and axis == columns_of(config)
        if own:
            fits = usable_warp_tiles(config, arch)
            reason = f"{'AB'[axis]} lies along {'mn'[axis]}: a warp tile is a multiple of {panel} there"
            fix = {"warp_tile": nearest(config.warp_tile, fits)} if fits else {}
            yield Violation("mn_major", "warp_tile", config.warp_tile, reason, fix)
        elif config.tile[axis] % unit:
            reason = f"{'AB'[axis]} lies along {'mn'[axis]}: its tile is cut into panels of {panel} for the cluster"
            yield Violation("mn_major", "cluster", config.cluster, reason, {"cluster": (1, 1, config.cluster[2])})


def copy_box(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: what a workgroup loads of A and B for its cluster is a box that the copy engine takes."""
    copies = _copies(config, arch)
    if copies is None:
        return
    unit, limit = copies.swizzle_rows, copies.max_box
    if any(size > limit or size % unit for size in config.tile[:2]):
        reason = f"A and B are loaded in boxes of up to {limit} rows, multiples of {unit}"
        yield Violation("copy_box", "tile", config.tile, reason, _boxed(config, arch, copies))
        return
    for axis in (0, 1):
        share = config.cluster[1 - axis]
        if config.tile[axis] % (share * unit):
            reason = f"{'AB'[axis]} is loaded in {share} parts, each a multiple of {unit} rows"
            yield Violation("copy_box", "cluster", config.cluster, reason, {"cluster": (1, 1, config.cluster[2])})
            return


def stored_lines(config: GemmConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: with the cshuffle epilogue the copy engine stores whole lines of C."""
    copies = _copies(config, arch)
    if copies is None or config.epilogue is not Epilogue.CSHUFFLE or config.transpose_c:
        return
    line = copies.swizzle_bytes // size_of(config.c)
    if config.warp_tile[1] % line:
        reason = f"a wave stores lines of {line} elements of C, which do not divide its {config.warp_tile[1]} columns"
        fix = {"epilogue": Epilogue.DEFAULT}
        yield Violation("stored_lines", "epilogue", config.epilogue.value, reason, fix)


def _portable(arch: ArchSpec) -> dict[str, object]:
    """A pipeline without producers, with a scheduler that it has."""
    name = next((name for name, offer in arch.pipelines.items() if not offer.register_splits), "")
    return {"pipeline": name, "scheduler": arch.pipeline(name).schedulers[0]} if name else {}


def _boxed(config: GemmConfig, arch: ArchSpec, copies: BulkCopy) -> dict[str, object]:
    """The tile with both sides in whole boxes; fewer waves where one warp tile each is more than a box."""
    for axis in (0, 1):
        unit = config.wave[axis] * config.warp_tile[axis]
        if unit > copies.max_box:
            waves = [wave for wave in arch.waves if wave[axis] * config.warp_tile[axis] <= copies.max_box]
            config = config.replace(wave=nearest(config.wave, waves) if waves else (1, 1, 1))
            unit = min(config.wave[axis] * config.warp_tile[axis], copies.max_box)
        size = min(config.tile[axis], copies.max_box // unit * unit)
        rows = -(-size // copies.swizzle_rows) * copies.swizzle_rows
        config = config.replace(tile=with_extent(config.tile, axis, rows))
    return {"wave": config.wave, "tile": config.tile}

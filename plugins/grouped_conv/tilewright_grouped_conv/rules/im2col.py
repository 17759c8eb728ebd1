"""Rules on kernels whose pixels a copy engine gathers: the warp-specialised pipeline of Hopper, as GEMM has it.

A workgroup's producer copies pixels of an image and boxes of the other operand; consumers multiply them with
instructions of 64 rows and a flexible number of columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import IM2COL
from tilewright_grouped_conv.footprint.im2col import COPY_BYTES, LINE_BYTES
from tilewright_grouped_conv.vocabulary import Direction, Specialization
from tilewright_kit.config.rules import Violation, rule_of
from tilewright_kit.tiles.footprint.workgroup import consumers, is_specialised, size_of
from tilewright_kit.tiles.rules.tiling import is_positive
from tilewright_kit.tiles.tables import SIDE, nearest, usable_warp_tiles, with_extent
from tilewright_kit.types.vocabulary import Epilogue

__all__ = ["IM2COL_RULES", "PINGPONG_GROUPS"]

PINGPONG_GROUPS = 2
"""Wave groups that alternate in the pingpong schedule."""
_ELEMENT_BYTES = 2
_PORTABLE: dict[str, object] = {"pipeline": "compv4", "scheduler": "intrawave", "num_wave_groups": 1}


def _concerns(config: ConvConfig, arch: ArchSpec) -> bool:
    """True if this is such a kernel, of sizes that can be looked at."""
    return IM2COL.makes(config) and is_specialised(config, arch) and is_positive(config)


@rule_of("cuda")
def im2col_signature(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: operands of 16 bits and one type, of which the copy engine fills lines; one product, whose result is
    written, not added to.
    """
    if not _concerns(config, arch):
        return
    reasons = (
        (f"operands are of one type of 16 bits, not {config.a} and {config.b}",
         config.a != config.b or size_of(config.a) != _ELEMENT_BYTES),
        ("no template adds to what is there", config.accumulate),
        ("rows of the result lie at one distance, and the image's gradient has no stride", config.mapped_rows),
    )  # fmt: skip
    for reason, holds in reasons:
        if holds:
            yield Violation("im2col_signature", "pipeline", config.pipeline, reason, _PORTABLE)
            return


@rule_of("cuda")
def im2col_fields(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: what says nothing about such a kernel has its default, so that equal kernels have equal names: the filter
    is known at run time, offsets have all bits, and copies have 16 bytes.
    """
    if not _concerns(config, arch):
        return
    wanted: dict[str, Any] = {
        "specialization": Specialization.DEFAULT,
        "explicit_gemm": False,
        "two_stage": False,
        "split_image": False,
        "vector_sizes": tuple(COPY_BYTES // size_of(name) for name in (config.a, config.b, config.c)),
    }
    for name, value in wanted.items():
        have = getattr(config, name)
        if have != value:
            reason = f"pixels that a copy engine gathers leave {name} at {_text(value)}"
            yield Violation("im2col_fields", name, getattr(have, "value", have), reason, {name: value})


@rule_of("cuda")
def im2col_consumers(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: the register file is divided for that many consumers, of which each wave group of the pingpong schedule
    is one.
    """
    if not _concerns(config, arch):
        return
    offer, wave, pingpong = arch.pipeline(config.pipeline), config.wave, config.scheduler == "pingpong"
    groups = PINGPONG_GROUPS if pingpong else 1
    if config.num_wave_groups != groups:
        reason = f"the {config.scheduler} schedule has {groups} wave groups"
        yield Violation("im2col_consumers", "num_wave_groups", config.num_wave_groups, reason,
                        {"num_wave_groups": groups})  # fmt: skip
        return
    known = offer.register_split(consumers(config)) is not None
    if known and (wave == (1, 1, 1) if pingpong else wave[2] == 1):
        return
    counts = [split.consumers for split in offer.register_splits]
    allowed = [(1, 1, 1)] if pingpong else [item for item in arch.waves if math.prod(item) in counts and item[2] == 1]
    reason = "in the pingpong schedule each wave group is one wave"
    if not pingpong:
        reason = f"registers are divided for {', '.join(map(str, counts))} consumers"
    if wave not in allowed:
        yield Violation("im2col_consumers", "wave", wave, reason, {"wave": nearest(wave, allowed)})


@rule_of("cuda")
def im2col_tile(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: a wave has 64 rows and one instruction's columns; a step along k is a line of one tap's channels, or of
    the weights' gradient whole lines of pixels, then with both operands in panels of 64 rows and columns.
    """
    copies = arch.bulk_copy
    if not _concerns(config, arch) or copies is None:
        return
    weights, tile = config.direction is Direction.BACKWARD_WEIGHT, config.tile
    fits = [item for item in usable_warp_tiles(config, arch) if item[0] == SIDE]
    if config.letters[1] == "r":
        fits = [item for item in fits if item[1] % SIDE == 0]
    if config.warp_tile not in fits:
        fix = {"warp_tile": nearest(config.warp_tile, fits)} if fits else {}
        reason = f"the instruction has {SIDE} rows, and columns of weights that lie so in panels of {SIDE}"
        yield Violation("im2col_tile", "warp_tile", config.warp_tile, reason, fix)
        return
    wanted = config.wave[1] * config.warp_tile[1]
    if tile[1] != wanted:
        reason = f"along n each wave has one warp tile, so the tile has {wanted}"
        yield Violation("im2col_tile", "tile", tile, reason, {"tile": with_extent(tile, 1, wanted)})
        return
    line = LINE_BYTES // size_of(config.a)
    depth = min(max(tile[2] // line, 1) * line, copies.max_box) if weights else line
    if tile[2] != depth:
        reason = f"a step along k is {'a multiple of ' if weights else ''}{line} elements"
        yield Violation("im2col_tile", "tile", tile, reason, {"tile": with_extent(tile, 2, depth)})
    elif max(tile[:2]) > copies.max_box:
        reason = f"a box of the copy engine has up to {copies.max_box} rows"
        unit = config.wave[0] * SIDE
        rows = copies.max_box // unit * unit
        fix = {"tile": with_extent(tile, 0, rows)} if tile[1] <= copies.max_box and rows else {"wave": (1, 1, 1)}
        yield Violation("im2col_tile", "tile", tile, reason, fix)


@rule_of("cuda")
def im2col_lines(config: ConvConfig, arch: ArchSpec) -> Iterator[Violation]:
    """``ws``: with the cshuffle epilogue the copy engine stores whole lines of the result."""
    if not _concerns(config, arch) or config.epilogue is not Epilogue.CSHUFFLE:
        return
    line = LINE_BYTES // size_of(config.c)
    if config.warp_tile[1] % line:
        reason = f"a wave stores lines of {line} elements, which do not divide its {config.warp_tile[1]} columns"
        yield Violation("im2col_lines", "epilogue", config.epilogue.value, reason, {"epilogue": Epilogue.DEFAULT})


def _text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(getattr(value, "value", value))


IM2COL_RULES = (
    im2col_signature,
    im2col_fields,
    im2col_consumers,
    im2col_tile,
    im2col_lines,
)

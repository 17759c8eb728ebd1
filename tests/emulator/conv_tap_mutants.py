"""Bugs to plant in the convolutions of AMD GPUs whose steps keep within a tap: see ``conv_mutants.py``."""

from __future__ import annotations

from dataclasses import dataclass

from conv_mutants import ConvMutant
from conv_tap_cases import CASES, TapConfig, config_of

__all__ = ["TAP_MUTANTS", "TapMutant"]


@dataclass(frozen=True)
class TapMutant(ConvMutant):
    """``case`` of conv_tap_cases.py meets it."""

    def config(self) -> TapConfig:
        found = config_of(self.case, self.arch)
        assert found is not None and self.case in CASES
        return found


SOURCES, LOOP, TAPS = "amd/conv/sources.hpp", "amd/conv/loop.hpp", "conv/taps.hpp"
TURNED = "conv/turned_taps.hpp"

TAP_MUTANTS = [
    # waits and barriers
    TapMutant("no barrier at a step's beginning", LOOP, "    lds_barrier();\n    // First", "    // First"),
    TapMutant(
        "the first tile is not complete", LOOP, "    lds_barrier();\n    load(fragments[0]", "    load(fragments[0]"
    ),
    TapMutant(
        "the tile that others still read is written",
        LOOP,
        "move(held, at.shared + kSide * tile_bytes,",
        "move(held, at.shared + (1 - kSide) * tile_bytes,",
        arch="gfx950",
    ),
    TapMutant(
        "the tile before is read",
        LOOP,
        "at.shared + (1 - kSide) * tile_bytes, at, 0);",
        "at.shared + kSide * tile_bytes, at, 0);",
    ),
    # steps
    TapMutant("a step is fetched twice", LOOP, "next.k = from.a.k(3);", "next.k = from.a.k(2);"),
    TapMutant("the place of the next step is never found", LOOP, "      next.advance(from);\n", ""),
    TapMutant(
        "an odd step is left out", LOOP, "if (step < from.a.steps) run_step", "if (step > from.a.steps) run_step"
    ),
    TapMutant(
        "an odd number of steps has one more", LOOP, "step + 1 < from.a.steps; step", "step < from.a.steps; step"
    ),
    TapMutant(
        "the first row of products is made twice", LOOP, "fragments[kSide], 1, kRows", "fragments[kSide], 0, kRows"
    ),
    # lanes
    TapMutant(
        "the offset of the next lane's tap",
        SOURCES,
        "__builtin_amdgcn_readlane(value, lane)",
        "__builtin_amdgcn_readlane(value, lane ^ 1)",
    ),
    TapMutant(
        "the bit of the next tap", SOURCES, "(uint32_t)tap, 1) << 31", "(uint32_t)tap + 1, 1) << 31", arch="gfx950"
    ),
    TapMutant("lanes of the first tap alone", SOURCES, "const int lane = thread % kWave;", "const int lane = 0;"),
    # strides
    TapMutant("channels of the taps before count twice", SOURCES, " - (uint32_t)tap * bytes_of_channels);", ");"),
    TapMutant(
        "lines of weights lie over one another",
        SOURCES,
        "(uint32_t)line * weights.line",
        "(uint32_t)(line / 2) * weights.line",
    ),
    TapMutant("the first group's pixels for all", SOURCES, "(item * p.image_g - ", "(0 * p.image_g - "),
    TapMutant(
        "the first group's weights for all",
        SOURCES,
        "(item * p.weight_g + first * p.weight_n) * size;\n    const int lines",
        "(first * p.weight_n) * size;\n    const int lines",
    ),
    TapMutant("taps of the rows of a filter lie over one another", SOURCES, "found << (t * count & 31)", "found << t"),
    TapMutant(
        "the gradient's weights of the first tap",
        SOURCES,
        "own += (uint32_t)s.axis(i) * (uint32_t)p.axes[i].tap_stride;",
        "own += 0;",
        "data",
    ),
    # edges and tails
    TapMutant(
        "taps that do not meet the image", SOURCES, "missing[j] = ~taps_of_axes(", "missing[j] = 0 * taps_of_axes("
    ),
    TapMutant("pixels beyond the last one", SOURCES, " | (first_row + line >= (int)p.gemm.m)", ""),
    TapMutant(
        "the last axis's taps for all",
        SOURCES,
        "for (int axis = 1; axis >= 3 - Config::ndim; axis--)",
        "for (int axis = 1; axis > 1; axis--)",
    ),
    TapMutant(
        "places count from the image, not from ahead of it",
        SOURCES,
        "(pixels[j].offset + before) * size",
        "pixels[j].offset * size",
    ),
    TapMutant(
        "taps that go backwards count from the first one",
        SOURCES,
        "-(int)a.tap_step * ((int)a.taps - 1)",
        "0 * (int)a.taps",
        "data",
    ),
    TapMutant(
        "columns beyond the weights",
        SOURCES,
        "const int lines = min_of((int)p.gemm.n - first, Tile::extent);",
        "const int lines = Tile::extent;",
    ),
    TapMutant(
        "the gradient's columns beyond the weights",
        SOURCES,
        "(last + columns) * size +",
        "(last + columns + Tile::extent) * size +",
        "data",
    ),
    TapMutant(
        "steps beyond the last one go on",
        LOOP,
        "k = min_of(k + Config::tile_k, from.a.last);",
        "k += Config::tile_k;",
        "forward_line",
    ),
    # weights that are transposed as they are read
    TapMutant(
        "lanes read the columns that they get",
        TURNED,
        "column = first + line % 4 * 4;",
        "column = first + line / 4 * 4;",
        "data_turned",
        arch="gfx950",
    ),
    TapMutant(
        "both halves of 8 of k are the first one",
        TURNED,
        "Tile::offset(own + half * 4, column / 8)",
        "Tile::offset(own, column / 8)",
        "data_turned",
        arch="gfx950",
    ),
    TapMutant(
        "all groups of lanes have the first one's k",
        TURNED,
        "own = group * 8 + line / 4",
        "own = line / 4",
        "data_turned",
        arch="gfx950",
    ),
    TapMutant(
        "columns from the 128th on are the first ones",
        TURNED,
        " + to_column / 256 * 256 +",
        " +",
        "data_turned_wide",
        arch="gfx950",
    ),
    TapMutant(
        "slices of a step are all the first one",
        TURNED,
        "(uint32_t)(kk * kGroups * 8 * Tile::line_bytes)",
        "(uint32_t)(kk * 0)",
        "data_turned_phases",
        arch="gfx950",
    ),
    # slices
    TapMutant(
        "every slice begins at k = 0",
        SOURCES,
        ": begin(from), last(from + many - kDepth)",
        ": begin(0), last(many - kDepth)",
        "forward_slices_of_k",
    ),
    TapMutant(
        "a slice ends where the sum does",
        TAPS,
        "if (slices > 1 && !Base::gather",
        "if (slices > 9 && !Base::gather",
        "forward_slices_of_k",
    ),
]

"""More bugs to plant in the GEMM templates of AMD GPUs: waits, fences, lanes, strides, tails and swizzles.

See ``gemm_mutants.py``, whose form they have. All of them are planted by every full run.
"""

from __future__ import annotations

from typing import Any

from gemm_mutants import (
    ATOM,
    COMPV3,
    COMPV4,
    DIRECT_LDS,
    GEMM,
    LOADER,
    MAIN,
    MEM,
    ONE_SLICE,
    PLATFORM,
    RAGGED,
    SPLIT,
    Mutant,
)  # fmt: skip
from native_case import Sizes

__all__ = ["AMD_MUTANTS"]

DIRECT, PACKED, LAYOUT, CONVERT = "amd/direct.hpp", "amd/packed.hpp", "amd/layout.hpp", "amd/convert.hpp"
DEEP: dict[str, Any] = {**COMPV3, "tile": (64, 64, 64)}
SHUFFLED: dict[str, Any] = {"pipeline": "preshufflev2", "tile": (64, 64, 64)}
SHUFFLED_SPLIT: dict[str, Any] = {"config": {**SHUFFLED, "split_k": 2}, "split_k": 2, "sizes": Sizes(64, 64, 256)}
BYTES: dict[str, Any] = {"a": "int8", "b": "int8", "c": "int32", "warp_tile": (16, 16, 32)}
RAW: dict[str, Any] = {
    "a": "fp8", "b": "fp8", "c": "fp32", "warp_tile": (16, 16, 32), "pipeline": "comp_async", "tile": (64, 64, 128),
}  # fmt: skip

AMD_MUTANTS = [
    # waits and fences
    Mutant("split-K: arrives without a fence", PLATFORM, "1u, __ATOMIC_ACQ_REL,", "1u, __ATOMIC_RELAXED,",
           arch="gfx942", **SPLIT),
    Mutant("split-K: the last slice adds up, whether it came last or not", GEMM,
           "load_shared<1>(flag).w[0] == (uint32_t)slices - 1;", "slice == slices - 1;", order=-1, **SPLIT),
    Mutant("comp_async: no wait state behind m0", DIRECT, r"m0, %0\n\ts_nop 0\n\t", r"m0, %0\n\t", DIRECT_LDS),
    Mutant("comp_async: the first tile is not waited for", MAIN,
           "copy(tile, from, 0, at);\n    wait_direct();", "copy(tile, from, 0, at);", DIRECT_LDS),
    Mutant("preshufflev2: no barrier", MAIN, "lds_barrier();  // the other tile is complete; this one has been read\n",
           "\n", SHUFFLED),
    # lanes
    Mutant("comp_async: waves write over one another", DIRECT, "* (kWave * kDirectBytes);",
           "* (kWave / 2 * kDirectBytes);", DIRECT_LDS),
    Mutant("packed B: lanes take their neighbour's column", PACKED, "Atom::layout().row(lane) * kPackedVector",
           "Atom::layout().row(lane ^ 1) * kPackedVector", SHUFFLED),
    Mutant("the first half of a fragment is multiplied twice", ATOM, "__builtin_shufflevector(y, y, 2, 3)",
           "__builtin_shufflevector(y, y, 0, 1)", COMPV3),
    Mutant("bytes transposed in the wrong order", LOADER, "i % 4 < 2 ? 0x05010400 : 0x07030602",
           "i % 4 >= 2 ? 0x05010400 : 0x07030602", {**COMPV3, **BYTES, "b_col": False}),
    # strides
    Mutant("a thread's further blocks lie over one another", LOADER, "+ j * kStep * Tile::line_bytes",
           "+ j * Tile::line_bytes", {**COMPV3, "tile": (128, 128, 32)}),
    Mutant("packed B: one panel for all columns of a wave", PACKED, "(uint32_t)(panel + j) * panel_bytes",
           "(uint32_t)panel * panel_bytes", SHUFFLED),
    Mutant("packed B: the step before", MAIN, "packed_b[kk].fetch(next, b.panel",
           "packed_b[kk].fetch(b.at(step), b.panel", SHUFFLED),
    Mutant("compv4: a step is fetched twice", MAIN, "held.fetch(from, step + 2, at, kk, move_parts);",
           "held.fetch(from, step + 1, at, kk, move_parts);", COMPV4, Sizes(64, 64, 256)),
    Mutant("compv4, one slice: a step is fetched twice", MAIN,
           "held.fetch(from, step + 2, at);\n        multiply_rows",
           "held.fetch(from, step + 1, at);\n        multiply_rows", ONE_SLICE),
    Mutant("mem: a step is fetched twice", MAIN, "held[s].fetch(from, step + s + held_steps, at);",
           "held[s].fetch(from, step + s + held_steps - 1, at);", MEM),
    # tails
    Mutant("comp_async: steps that do not exist are read", DIRECT, "step < source.steps ? source.records : 0",
           "source.records", DIRECT_LDS),
    Mutant("steps that do not exist are read", LOADER, "step < steps ? (int)records : 0", "(int)records", COMPV4),
    Mutant("rows beyond the last one are read", LOADER, "line < panel.lines ? max_of(", "line >= 0 ? max_of(", COMPV3,
           RAGGED),
    Mutant("packed B: split-K reads beyond the buffer's end", PACKED,
           "left(panel - (uint32_t)k0 * size_of<E> * kColumns)", "left(panel)", **SHUFFLED_SPLIT),
    Mutant("packed B: later steps read beyond the buffer's end", PACKED, "+ left) - step * kAdvance;", "+ left);",
           SHUFFLED, Sizes(64, 64, 256)),
    Mutant("packed B: the last panel is missing", PACKED, "panels(ceil_div(total - first, kColumns))",
           "panels((total - first) / kColumns)", SHUFFLED),
    Mutant("the lines of a block that is transposed are the first one", LOADER, "x[r] = load(panel, line + r, chunk);",
           "x[r] = load(panel, line, chunk);", {**COMPV3, "b_col": False}, RAGGED),
    # swizzles
    Mutant("comp_async: chunks are not permuted", DIRECT, "slot ^ Tile::key(slot / Tile::chunks);", "slot;",
           DIRECT_LDS),
    Mutant("fragments of later chunks read the first ones", LAYOUT, "^ (uint32_t)(more % units * 16))", "^ 0u)", DEEP),
    Mutant("fragments of further lines read the first ones", LAYOUT, "repeats ? (uint32_t)(beyond * line_bytes) : 0",
           "0", COMPV3),
    # formats
    Mutant("raw bytes are not mended", ATOM, "kIsFnuz<Element> && Tile::raw", "false", RAW, Sizes(64, 64, 256),
           arch="gfx942"),
    Mutant("FNUZ products keep half of their value", CONVERT, "kIsSmallFloat<E> ? 2.0f : 1.0f", "1.0f", RAW,
           Sizes(64, 64, 256), arch="gfx942"),
]  # fmt: skip

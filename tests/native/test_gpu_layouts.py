"""Layouts, fragment maps and tile orders of the portable GPU kernels, computed by the headers themselves on the CPU."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import numpy as np
import pytest
from gpu_emulation import FLAGS
from native_harness import build_once

TILES = [  # element type, k contiguous, extent (m or n), depth (k)
    *itertools.product(("bf16",), (True,), (64, 96), (32, 64, 96)),
    *itertools.product(("bf16",), (False,), (16, 64, 96, 128), (32, 64)),
    *itertools.product(("int8",), (True,), (64, 128), (32, 64, 128)),
    *itertools.product(("int8",), (False,), (16, 32, 64, 128, 96), (64,)),
    *itertools.product(("fp32",), (True,), (64, 128), (16, 32)),
    *itertools.product(("fp32",), (False,), (32, 64, 128), (16,)),
]
IDS = [f"{e}_{'k' if k else 'mn'}_{extent}x{depth}" for e, k, extent, depth in TILES]
TEXT = """
#include "tilewright/gpu/gemm/gemm.hpp"
using namespace tw::gpu;
#define TILE(NAME, E, K, EXTENT, DEPTH) \\
  using NAME = OperandTile<tw::E, K, EXTENT, DEPTH>; \\
  API void NAME##_offsets(int* lines, int* chunks, int* out) { \\
    *lines = NAME::lines, *chunks = NAME::chunks; \\
    for (int l = 0; l < NAME::lines; l++) for (int c = 0; c < NAME::chunks; c++) *out++ = (int)NAME::offset(l, c); \\
  } \\
  API void NAME##_matrices(int is_a, int* out) { \\
    for (int lane = 0; lane < 32; lane++) { \\
      const MatrixPlace p = is_a ? matrix_place<NAME, true>(lane) : matrix_place<NAME, false>(lane); \\
      *out++ = p.line, *out++ = p.chunk; \\
    } \\
  }
#define API extern "C" __attribute__((visibility("default")))
API void raster_of(int tiles, int rows, int columns, int* out) {
  for (int i = 0; i < tiles; i++) { const TileIndex t = raster(i, rows, columns); *out++ = t.row, *out++ = t.column; }
}
API void slices_of(int k, int slices, int tile_k, int* out) {
  for (int s = 0; s < slices; s++) {
    const Slice x = slice_of(k, slices, s, tile_k);
    *out++ = x.begin, *out++ = x.length;
  }
}
template <class Atom> int places(int* out) {
  for (int lane = 0; lane < 32; lane++)
    for (int strip = 0; strip < Atom::strips; strip++)
      for (int index = 0; index < Atom::strip_runs; index++)
        for (int e = 0; e < Atom::run; e++)
          *out++ = strip * Atom::strip_rows + Atom::run_row(lane, index), *out++ = Atom::run_column(lane, index) + e;
  return Atom::strip_rows;
}
#define PLACES(NAME, E, ACOL, BCOL, ATOM) API int NAME(int* out) { \\
    return places<ATOM<OperandTile<tw::E, !ACOL, 64, 32>, OperandTile<tw::E, BCOL, 64, 32>, 64, 32>>(out); }
"""


@pytest.fixture(scope="module")
def headers(build_folder: Path) -> ctypes.CDLL:
    text = TEXT
    for name, (e, k, extent, depth) in zip(IDS, TILES, strict=True):
        text += f"TILE({name}, {e}, {str(k).lower()}, {extent}, {depth})\n"
    for (e, atom), a, b in itertools.product(ATOMS, (0, 1), (0, 1)):
        text += f"PLACES(places_{e}_{a}{b}, {e}, {str(bool(a)).lower()}, {str(bool(b)).lower()}, {atom})\n"
    return ctypes.CDLL(str(build_once(build_folder, text, FLAGS)))


ATOMS = (("bf16", "MmaAtom"), ("int8", "MmaAtom"), ("fp32", "SimtAtom"))


def offsets(headers: ctypes.CDLL, name: str) -> np.ndarray:
    lines, chunks, out = ctypes.c_int(), ctypes.c_int(), (ctypes.c_int * 65536)()
    getattr(headers, f"{name}_offsets")(ctypes.byref(lines), ctypes.byref(chunks), out)
    return np.array(out[: lines.value * chunks.value]).reshape(lines.value, chunks.value)


def ways(addresses: np.ndarray) -> int:
    """Bank conflicts of one access of 16 bytes a lane: the most different chunks that share their banks."""
    chunks = np.unique(np.asarray(addresses) // 16)
    return int(np.bincount(chunks % 8).max())


@pytest.mark.parametrize("name", IDS)
def test_every_chunk_has_a_place_of_its_own(headers: ctypes.CDLL, name: str) -> None:
    places = offsets(headers, name)
    assert sorted(places.ravel().tolist()) == list(range(0, places.size * 16, 16))


@pytest.mark.parametrize(("name", "tile"), list(zip(IDS, TILES, strict=True)))
def test_matrix_loads_meet_no_bank_twice(headers: ctypes.CDLL, name: str, tile: tuple[str, bool, int, int]) -> None:
    element, k_major, extent, depth = tile
    if element == "fp32":
        pytest.skip("read by the SIMT atom")
    at = offsets(headers, name)
    step = {"bf16": 16, "int8": 32}[element]
    # Lines of bytes that are no multiple of 64: too few chunks may change places for the lines of one load.
    allowed = 2 if element == "int8" and not k_major and extent % 64 else 1
    for is_a in (0, 1):
        out = (ctypes.c_int * 64)()
        getattr(headers, f"{name}_matrices")(is_a, out)
        lanes = np.array(out).reshape(32, 2)
        for first, kk in itertools.product(range(0, extent, 16), range(depth // step)):
            for matrix in range(4):
                line, chunk = lanes[matrix * 8 : matrix * 8 + 8].T
                if k_major:
                    addresses = at[first + line, kk * 2 + chunk]
                else:
                    addresses = at[kk * step + line, first * (2 if element == "bf16" else 1) // 16 + chunk]
                assert ways(addresses) <= allowed, (first, kk, matrix)


@pytest.mark.parametrize(("name", "tile"), [x for x in zip(IDS, TILES, strict=True) if x[1][0] == "fp32"])
def test_simt_reads_meet_no_bank_twice(headers: ctypes.CDLL, name: str, tile: tuple[str, bool, int, int]) -> None:
    _, k_major, extent, depth = tile
    at = offsets(headers, name)
    if k_major:  # eight neighbouring rows, then the next eight; one chunk of k
        for first, chunk in itertools.product(range(0, extent, 8), range(depth // 4)):
            assert ways(at[first : first + 8, chunk]) == 1
    else:  # eight neighbouring chunks of one step of k
        for line, first in itertools.product(range(depth), range(0, extent // 4, 8)):
            assert ways(at[line, first : first + 8]) == 1


@pytest.mark.parametrize("name", IDS)
def test_copies_meet_no_bank_twice(headers: ctypes.CDLL, name: str) -> None:
    """Eight neighbouring lanes write eight neighbouring chunks."""
    flat = offsets(headers, name).ravel()
    for first in range(0, flat.size, 8):
        assert ways(flat[first : first + 8]) <= (1 if offsets(headers, name).shape[1] % 6 else 2)


@pytest.mark.parametrize(
    ("element", "a_col", "b_col"), [(e, a, b) for (e, _), a, b in itertools.product(ATOMS, (0, 1), (0, 1))]
)
def test_every_result_has_one_owner(headers: ctypes.CDLL, element: str, a_col: int, b_col: int) -> None:
    out = (ctypes.c_int * (2 * 64 * 32))()
    strip_rows = getattr(headers, f"places_{element}_{a_col}{b_col}")(out)
    places = {tuple(x) for x in np.array(out).reshape(-1, 2).tolist()}
    assert places == set(itertools.product(range(64), range(32)))
    assert 64 % strip_rows == 0


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 9), (7, 3), (8, 5), (9, 4), (33, 17), (64, 2)])
def test_the_raster_visits_every_tile_once(headers: ctypes.CDLL, rows: int, columns: int) -> None:
    out = (ctypes.c_int * (2 * rows * columns))()
    headers.raster_of(rows * columns, rows, columns, out)
    visited = [tuple(x) for x in np.array(out).reshape(-1, 2).tolist()]
    assert sorted(visited) == sorted(itertools.product(range(rows), range(columns)))


@pytest.mark.parametrize("k", [0, 1, 31, 32, 33, 257, 4096, 2**31 - 1])
def test_slices_partition_k_at_multiples_of_the_tile(headers: ctypes.CDLL, k: int) -> None:
    for slices, tile_k in itertools.product((1, 2, 3, 7, 16), (16, 32, 64)):
        out = (ctypes.c_int * (2 * slices))()
        headers.slices_of(k, slices, tile_k, out)
        at = 0
        for begin, length in np.array(out).reshape(-1, 2).tolist():
            assert length >= 0
            if length:
                assert begin == at and (begin % tile_k == 0)
                at += length
        assert at == k

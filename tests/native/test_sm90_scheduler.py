"""The order of work of the Hopper kernels, run on the host: every step of every tile is somebody's, exactly once."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from native_harness import build_once

SOURCE = """
#define __device__
#define __forceinline__ inline
struct Position { int x; };
static Position blockIdx, gridDim, threadIdx;
inline int __shfl_sync(unsigned, int x, int) { return x; }
inline unsigned long __cvta_generic_to_shared(const void* p) { return (unsigned long)p; }
#include "tilewright/sm90/gemm/scheduler.hpp"
using namespace tw::sm90;

struct Tasks {
  Extent extent[3];
  int count;
  int tiles() const {
    int sum = 0;
    for (int i = 0; i < count; i++) sum += extent[i].tiles();
    return sum;
  }
  Extent find(int index, int& task, int& within) const {
    task = 0;
    while (index >= extent[task].tiles()) index -= extent[task++].tiles();
    within = index;
    return extent[task];
  }
};

// Rows of (block, task, tile_m, tile_n, batch, first_step, steps, tile, part, parts, slot).
template <class Queue>
int run(const Tasks& tasks, int split, int grid, int cluster, int* out) {
  int count = 0;
  gridDim.x = grid;
  for (int block = 0; block < grid; block++) {
    blockIdx.x = block;
    Queue queue(tasks, split, block % cluster);
    Work work;
    while (queue.next(work)) {
      int* row = out + 11 * count++;
      const int values[11] = {block, work.task, work.tile_m, work.tile_n, work.batch, work.first_step, work.steps,
                              work.tile, work.part, work.parts, work.slot(work.part)};
      for (int i = 0; i < 11; i++) row[i] = values[i];
    }
  }
  return count;
}
extern "C" __attribute__((visibility("default"))) int quotients(const int* a, const int* b, int n, int* out) {
  for (int i = 0; i < n; i++) out[i] = quotient(a[i], b[i]);
  return n;
}
extern "C" __attribute__((visibility("default"))) int work(int kind, const int* extents, int count, int split, int grid,
                                                           int* out) {
  Tasks tasks;
  tasks.count = count;
  for (int i = 0; i < count; i++)
    tasks.extent[i] = {extents[4 * i], extents[4 * i + 1], extents[4 * i + 2], extents[4 * i + 3]};
  using One = ClusterShape<1, 1>;
  using Two = ClusterShape<2, 1>;
  using Four = ClusterShape<2, 2>;
  switch (kind) {
    case 0: return run<TileQueue<Tasks, One, 7, true, true>>(tasks, split, grid, 1, out);
    case 1: return run<TileQueue<Tasks, Four, 3, true, true>>(tasks, split, grid, 4, out);
    case 2: return run<TileQueue<Tasks, Two, 5, false, true>>(tasks, split, grid, 2, out);
    case 3: return run<StreamQueue<Tasks, One, 7>>(tasks, 1, grid, 1, out);
    default: return run<StreamQueue<Tasks, Four, 3>>(tasks, 1, grid, 4, out);
  }
}
"""
FIELDS = ("block", "task", "tile_m", "tile_n", "batch", "first_step", "steps", "tile", "part", "parts", "slot")
CLUSTERS = {0: (1, 1), 1: (2, 2), 2: (2, 1), 3: (1, 1), 4: (2, 2)}
Work = dict[str, int]


@pytest.fixture(scope="module")
def library(build_folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(build_once(build_folder, SOURCE, ["-Wno-unused", "-Wno-unknown-pragmas"])))


def work_of(library: ctypes.CDLL, kind: int, extents: list[tuple[int, ...]], split: int, grid: int) -> list[Work]:
    flat = np.array(extents, dtype=np.int32).ravel()
    cluster = CLUSTERS[kind][0] * CLUSTERS[kind][1]
    most = sum(r * c * b for r, c, b, _ in extents) * cluster * split + 2 * grid
    out = np.zeros((most, len(FIELDS)), dtype=np.int32)
    count = library.work(
        kind, flat.ctypes.data_as(ctypes.c_void_p), len(extents), split, grid, out.ctypes.data_as(ctypes.c_void_p)
    )
    assert count <= most
    return [dict(zip(FIELDS, map(int, row), strict=True)) for row in out[:count]]


def check_cover(work: list[Work], extents: list[tuple[int, ...]], cluster: tuple[int, int], slots: int) -> None:
    """Each tile's parts are its steps in order; tiles and slots are nobody else's. A part with nothing to do takes one
    step beyond the last, where all is zero.
    """
    tiles: dict[tuple[int, ...], list[Work]] = defaultdict(list)
    for one in work:
        tiles[one["task"], one["batch"], one["tile_m"], one["tile_n"]].append(one)
    expected = {
        (task, batch, i, j)
        for task, (rows, columns, batches, _) in enumerate(extents)
        for batch in range(batches)
        for i in range(rows * cluster[0])
        for j in range(columns * cluster[1])
    }
    assert set(tiles) == expected
    numbers, used = set(), []
    for key, parts in tiles.items():
        parts.sort(key=lambda one: one["part"])
        assert [one["part"] for one in parts] == list(range(parts[0]["parts"]))
        assert len({one["tile"] for one in parts}) == 1
        numbers.add(parts[0]["tile"])
        step, last = 0, extents[key[0]][3]
        for one in parts:
            if step < last:
                assert one["first_step"] == step
                step += one["steps"]
            else:
                assert one["first_step"] >= last
            assert one["steps"] >= 1
        assert step == last
        if len(parts) > 1:
            used += [one["slot"] for one in parts]
    assert numbers == set(range(len(tiles)))
    assert len(set(used)) == len(used)
    assert all(0 <= slot < slots for slot in used)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", range(5))
def test_every_step_is_done_once(library: ctypes.CDLL, kind: int, seed: int) -> None:
    rng = np.random.default_rng(1000 * kind + seed)
    stream, cluster = kind >= 3, CLUSTERS[kind]
    size = cluster[0] * cluster[1]
    extents = [
        (*(int(x) for x in rng.integers(1, 12, 2)), int(rng.integers(1, 4)), int(rng.integers(1, 40)))
        for _ in range(1 if stream else int(rng.integers(1, 4)))
    ]
    split = 1 if stream else int(rng.integers(1, 5))
    tiles = sum(r * c * b for r, c, b, _ in extents) * size
    grid = tiles * split if kind == 2 else size * int(rng.integers(1, 34))
    work = work_of(library, kind, extents, split, grid)
    check_cover(work, extents, cluster, 2 * grid if stream else tiles * split)
    # All workgroups of a cluster do the same steps of neighbouring tiles, one after the other.
    by_block: dict[int, list[Work]] = defaultdict(list)
    for one in work:
        by_block[one["block"]].append(one)
    for block, mine in by_block.items():
        first = by_block[block // size * size]
        assert [(x["first_step"], x["steps"], x["parts"]) for x in mine] == [
            (x["first_step"], x["steps"], x["parts"]) for x in first
        ]
        assert all(x["tile_m"] // cluster[0] == y["tile_m"] // cluster[0] for x, y in zip(mine, first, strict=True))


def test_stream_k_shares_evenly(library: ctypes.CDLL) -> None:
    """Three tiles over 132 workgroups: all have work, and nobody more than one step above another."""
    work = work_of(library, 3, [(1, 3, 1, 64)], 1, 132)
    steps = np.bincount([one["block"] for one in work], weights=[one["steps"] for one in work], minlength=132)
    assert steps.sum() == 192
    assert steps.max() - steps.min() <= 1


def test_quotient_is_exact(library: ctypes.CDLL, rng: np.random.Generator) -> None:
    a = (2.0 ** rng.uniform(0, 31, 200000)).astype(np.int64).clip(0, 2**31 - 1).astype(np.int32)
    b = (2.0 ** rng.uniform(0, 31, 200000)).astype(np.int64).clip(1, 2**31 - 1).astype(np.int32)
    a[::5] = (a[::5] // b[::5]) * b[::5]  # exact multiples, and one below
    a[1::5] = np.maximum((a[1::5] // b[1::5]) * b[1::5] - 1, 0)
    out = np.empty_like(a)
    pointer = [x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, out)]
    library.quotients(pointer[0], pointer[1], len(a), pointer[2])
    np.testing.assert_array_equal(out, a // b)

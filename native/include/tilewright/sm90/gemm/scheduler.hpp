// Which output tile, and which range of its steps along k, a workgroup computes next. All threads of a workgroup (and
// all workgroups of a cluster, whose tiles are neighbours) go through the same sequence, each computing it for itself.
//
// Tiles are counted in clusters: a task has rows x columns of them per batch item, rounded up, so that a workgroup at
// the edge may get a tile that lies outside the result. Within a batch item they are visited in bands of kBand rows,
// down each band's columns: the tiles that are computed at the same time then form a near square, whose operands fit
// the L2 cache.
#pragma once
#include "tilewright/sm90/blocks/cluster.hpp"

namespace tw::sm90 {

// a / b for a >= 0, b > 0: by a reciprocal and two corrections, in a fraction of the compiler's exact sequence. It is
// on the way to the first copy and between tiles.
TW_SM90 int quotient(int a, int b) {
  float inverse;
#if defined(__CUDA_ARCH__)
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"((float)b));
#else
  inverse = 1.0f / (float)b;
#endif
  int q = (int)((float)a * inverse);         // off by at most 2^-21 of itself
  q += (int)((float)(a - q * b) * inverse);  // off by at most one
  const int rest = a - q * b;
  return q + (rest >= b ? 1 : 0) - (rest < 0 ? 1 : 0);
}

// The tiles of one task, in clusters, and the k steps of each.
struct Extent {
  int rows, columns, batch, steps;
  TW_SM90 int tiles() const { return rows * columns * batch; }
};

// A workgroup's next piece of work.
struct Work {
  int task = 0;
  int tile_m, tile_n, batch;  // this workgroup's tile, in tiles
  int first_step, steps;      // its range of k steps, at least one, which may lie beyond the last: all zeros
  int tile;                   // number of the tile among all of all tasks: its counter
  int part, parts;            // which part of the tile this is, by position along k; parts == 1: all of it
  int first_slot;             // see slot()

  // The workspace slot of part `i` of this tile. Split-K: one per (tile, part). Stream-K: two per workgroup, the first
  // for a part that begins inside a tile, the second for one that begins with it; only part 0 can do that.
  int slot_step, slot_skip;
  TW_SM90 int slot(int i) const { return first_slot + i * slot_step + (i == 0 ? 0 : slot_skip); }
};

// Fills in the position of the cluster's tile `index` of a task, as seen by the workgroup of the given rank.
template <class Cluster, int kBand>
TW_SM90 void place(Work& work, const Extent& extent, int index, int rank) {
  const int area = extent.rows * extent.columns;
  work.batch = extent.batch == 1 ? 0 : quotient(index, area);
  index -= work.batch * area;
  const int band = quotient(index, kBand * extent.columns), first = band * kBand;
  const int height = extent.rows - first < kBand ? extent.rows - first : kBand;
  const int within = index - first * extent.columns, column = quotient(within, height);
  work.tile_m = (first + within - column * height) * Cluster::m + Cluster::m_of(rank);
  work.tile_n = column * Cluster::n + Cluster::n_of(rank);
}

// Whole tiles, or `split` slices of each, dealt out to the clusters in turn. Tasks offers
//   int tiles()                          clusters' tiles of all tasks
//   Extent find(int index, int& task, int& within)   the task that holds tile `index`, starting the search at `task`,
//   and
//                                        the tile's number in it
template <class Tasks, class Cluster, int kBand, bool kPersistent, bool kSplit>
struct TileQueue {
  Tasks tasks;
  int split, rank, index, stride, end, task = 0;

  TW_SM90 TileQueue(const Tasks& of, int slices, int cluster_rank)
      : tasks(of), split(kSplit ? slices : 1), rank(cluster_rank) {
    index = (int)blockIdx.x / Cluster::size;
    stride = (int)gridDim.x / Cluster::size;
    end = tasks.tiles() * split;
  }
  TW_SM90 bool next(Work& work) {
    if (index >= end) return false;
    const int tile = kSplit ? quotient(index, split) : index;
    int within;
    const Extent extent = tasks.find(tile, task, within);
    place<Cluster, kBand>(work, extent, within, rank);
    work.task = task;
    work.tile = tile * Cluster::size + rank;
    work.part = kSplit ? index - tile * split : 0;
    work.parts = split;
    const int chunk = kSplit ? quotient(extent.steps + split - 1, split) : extent.steps;
    work.first_step = work.part * chunk;
    const int left = extent.steps - work.first_step;
    work.steps = left < 1 ? 1 : left < chunk ? left : chunk;
    work.first_slot = work.tile * split;
    work.slot_step = 1;
    work.slot_skip = 0;
    index = kPersistent ? index + stride : end;
    return true;
  }
};

// Stream-K: the steps of the first tiles are cut into equal contiguous ranges, one per cluster, and the remaining
// tiles, a multiple of the number of clusters, are dealt out whole. A range is at least one tile long unless there are
// fewer tiles than clusters. One task.
template <class Tasks, class Cluster, int kBand>
struct StreamQueue {
  Extent extent;
  int rank, cluster, clusters, shared_tiles, active, at, end, whole, tiles;

  TW_SM90 StreamQueue(const Tasks& tasks, int, int cluster_rank) : rank(cluster_rank) {
    int task = 0, within;
    extent = tasks.find(0, task, within);
    cluster = (int)blockIdx.x / Cluster::size;
    clusters = (int)gridDim.x / Cluster::size;
    tiles = tasks.tiles();
    const int rest = tiles % clusters;
    shared_tiles = tiles < clusters ? tiles : rest == 0 ? 0 : rest + clusters;
    active = clusters < steps_shared() ? clusters : steps_shared();
    at = cluster < active ? begin_of(cluster) : 0;
    end = cluster < active ? begin_of(cluster + 1) : 0;
    whole = shared_tiles + cluster;
  }
  TW_SM90 int steps_shared() const { return shared_tiles * extent.steps; }
  // The first step of a cluster's range, and the cluster whose range holds a step.
  TW_SM90 int begin_of(int of) const { return (int)((int64_t)steps_shared() * of / active); }
  TW_SM90 int owner_of(int step) const { return (int)((((int64_t)step + 1) * active - 1) / steps_shared()); }

  TW_SM90 bool next(Work& work) {
    int tile;
    work.part = 0;
    work.parts = 1;
    work.first_step = 0;
    work.steps = extent.steps;
    work.first_slot = work.slot_step = work.slot_skip = 0;
    if (at < end) {
      tile = quotient(at, extent.steps);
      const int tile_begin = tile * extent.steps, tile_end = tile_begin + extent.steps;
      const int stop = end < tile_end ? end : tile_end;
      const int first = owner_of(tile_begin), last = owner_of(tile_end - 1);
      work.first_step = at - tile_begin;
      work.steps = stop - at;
      work.part = cluster - first;
      work.parts = last - first + 1;
      work.first_slot = (first * Cluster::size + rank) * 2 + 1;
      work.slot_step = Cluster::size * 2;
      work.slot_skip = -1;
      at = stop;
    } else {
      if (whole >= tiles) return false;
      tile = whole;
      whole += clusters;
    }
    place<Cluster, kBand>(work, extent, tile, rank);
    work.tile = tile * Cluster::size + rank;
    return true;
  }
};

}  // namespace tw::sm90

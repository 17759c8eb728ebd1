// Which output tile, of which task, and which slice of k a workgroup computes.
#pragma once
#include "tilewright/gpu/gemm/params.hpp"
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

// Tiles in an order in which those that run at the same time share rows of A and columns of B: bands of kBand tile
// rows, column by column.
constexpr int kBand = 8;
struct TileIndex {
  int row, column;
};
constexpr TileIndex raster(int index, int rows, int columns) {
  const int band = index / (kBand * columns), within = index - band * (kBand * columns);
  const int left = rows - band * kBand, height = left < kBand ? left : kBand;
  return {band * kBand + within % height, within / height};
}

// The part of k that slice `slice` of `slices` covers, as tw_gemm_args states it.
struct Slice {
  int begin, length;
};
constexpr Slice slice_of(int k, int slices, int slice, int tile_k) {
  if (slices <= 1) return {0, k};
  const uint32_t each = ((uint32_t)k + slices - 1) / slices, per_slice = (each + tile_k - 1) / tile_k * tile_k;
  const int64_t begin = (int64_t)slice * per_slice, left = k - begin;
  if (left <= 0) return {k, 0};
  return {(int)begin, (int)(left < per_slice ? left : per_slice)};
}

// The task that owns output tile `tile`: the last one whose first_tile is not beyond it. All lanes of a wave look
// together, so that a table of a thousand tasks takes two looks.
template <class Task>
TW_DEVICE int find_task(const Task* tasks, int count, int tile) {
  const int lane = lane_index();
  int first = 0;
  while (count > 1) {
    const int stride = ceil_div(count, kWave), i = lane * stride;
    const bool before = i < count && load_constant<int64_t>(&tasks[first + i].first_tile) <= tile;
    const int passed = count_lanes(before) - 1;  // lanes see a sorted list: the set ones come first
    first += passed * stride;
    count = min_of(stride, count - passed * stride);
  }
  return first;
}

template <class Task>
struct Work {
  const Task* task;
  int64_t item;  // of the batch
  TileIndex tile;
  int index;  // of the output tile among all
};

template <class Config, class Params>
TW_DEVICE const typename Params::Task* task_of(const Params& params, int index) {
  if constexpr (Config::grouped) {
    const auto* const tasks = (const typename Params::Task*)params.launch.tasks;
    return tasks + find_task(tasks, (int)params.launch.count, index);
  } else {
    return &params.task;
  }
}

// That task, as if read for the first time: what the beginning, the loop and the end of a convolution take from it is
// more than AMD GPUs have scalar registers for at a time.
template <class Config, class Params>
TW_DEVICE const typename Params::Task& task_again(const Params& params, const typename Params::Task* task) {
  if constexpr (!Config::grouped) {
    return read_again(params).task;
  } else {
#if defined(__HIP__)
    using Task = typename Params::Task;
    auto from = (const __attribute__((address_space(4))) Task*)task;
    asm volatile("" : "+s"(from));
    task = (const Task*)from;
#endif
    return *task;
  }
}

template <class Config, class Params>
TW_DEVICE Work<typename Params::Task> find_work(const Params& params, int index) {
  const auto* const task = task_of<Config>(params, index);
  const tw_gemm_problem& problem = task->product();
  const int rows = ceil_div((int)problem.m, Config::tile_m), columns = ceil_div((int)problem.n, Config::tile_n);
  int within = Config::grouped ? index - (int)task->first_tile : index;
  int item = 0;
  if (problem.batch > 1) {
    item = within / (rows * columns);
    within -= item * (rows * columns);
  }
  return {task, item, raster(within, rows, columns), index};
}

}  // namespace tw::gpu

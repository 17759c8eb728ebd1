// Which tile of which expert a workgroup computes next. How many there are is known on the device alone: a warp adds up
// the counts of all experts, and leaves in shared memory where each begins. All threads of a workgroup go through the
// same tiles, each finding them for itself.
#pragma once
#include "tilewright/core/moe_rows.hpp"
#include "tilewright/gpu/gemm/params.hpp"
#include "tilewright/sm90/gemm/scheduler.hpp"

namespace tw::sm90 {

// The only parameter of the kernel, by value (tilewright_moe/plan.py).
struct alignas(64) MoeParams {
  TensorMapBytes x, w, out;
  tw_moe_args args;
};
static_assert(sizeof(tw_moe_args) == 328 && sizeof(MoeParams) == 768, "as the plugin packs them");

TW_SM90 void store_pair(uint32_t address, int x, int y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
TW_SM90 int2 load_pair(uint32_t address) {
  int2 pair;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(pair.x), "=r"(pair.y) : "r"(address) : "memory");
  return pair;
}

// An expert's entry, 8 bytes: its first tile, and its first row of x (masked: its rows). One more ends the table.
template <int kTileM, int kTileN>
struct MoeTable {
  uint32_t at;

  // One warp.
  TW_SM90 void make(const tw_moe_args& args) const {
    const int lane = threadIdx.x % kWarp, experts = (int)args.product.batch, columns = columns_of(args);
    const uint32_t room = (uint32_t)args.product.m;
    uint32_t row = 0, tile = 0;
    for (int first = 0; first < experts; first += kWarp) {
      const uint32_t left = args.masked ? room : room - row;
      const int32_t count = first + lane < experts ? args.counts[first + lane] : 0;
      uint32_t rows = (uint32_t)moe_cut(count, left), end = rows;  // cut at each step: sums stay below 2^32
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end = end + other < left ? end + other : left;
      }
      uint32_t before = __shfl_up_sync(0xffffffffu, end, 1);
      if (lane == 0) before = 0;
      if (!args.masked && rows > left - before) rows = left - before;
      uint32_t last = (rows + kTileM - 1) / kTileM * columns;
      const uint32_t mine = last;
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, last, step);
        if (lane >= step) last += other;
      }
      if (first + lane < experts)
        store_pair(at + (first + lane) * 8, (int)(tile + last - mine), (int)(args.masked ? rows : row + before));
      tile += __shfl_sync(0xffffffffu, last, kWarp - 1);
      if (!args.masked) row += __shfl_sync(0xffffffffu, end, kWarp - 1);
    }
    if (lane == 0) store_pair(at + experts * 8, (int)tile, (int)row);
  }

  static TW_SM90 int columns_of(const tw_moe_args& args) { return ((int)args.product.n + kTileN - 1) / kTileN; }
};

// A workgroup's next tile.
struct MoeTile {
  int expert;
  int first;   // masked: 0; else the expert's first row of x
  int rows;    // of the expert
  int row;     // the tile's first row, among the expert's
  int column;  // in tiles
};

// kShare: workgroups of a cluster, which take a tile of kTileN columns together.
template <int kTileM, int kTileN, int kShare = 1>
struct MoeQueue {
  uint32_t at;
  int index, end, columns;
  bool masked;
  int expert = 0;
  int2 here, next_one;

  TW_SM90 MoeQueue(uint32_t table, const tw_moe_args& args)
      : at(table), columns(MoeTable<kTileM, kTileN>::columns_of(args)), masked(args.masked != 0) {
    index = (int)blockIdx.x / kShare;
    end = load_pair(at + (int)args.product.batch * 8).x;
    here = load_pair(at);
    next_one = load_pair(at + 8);
  }
  TW_SM90 bool next(MoeTile& tile) {
    if (index >= end) return false;
    while (next_one.x <= index) {
      expert++;
      here = next_one;
      next_one = load_pair(at + (expert + 1) * 8);
    }
    tile.expert = expert;
    tile.first = masked ? 0 : here.y;
    tile.rows = masked ? here.y : next_one.y - here.y;
    // Tiles of the same columns, whose weights are the same, come one after the other.
    const int high = (tile.rows + kTileM - 1) / kTileM, within = index - here.x;
    tile.column = high == 1 ? within : quotient(within, high);
    tile.row = (within - tile.column * high) * kTileM;
    index += (int)gridDim.x / kShare;
    return true;
  }
};

}  // namespace tw::sm90

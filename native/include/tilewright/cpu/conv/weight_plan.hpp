// How the gradient of the weights is cut, and how much scratch memory that takes: the Python mirror of these formulas
// is tilewright_grouped_conv/footprint/cpu.py.
#pragma once
#include "tilewright/core/args/conv.h"
#include "tilewright/cpu/blocks/blocking.hpp"

TW_NAMESPACE_BEGIN

constexpr int64_t kChunkBytes = 2 << 20;  // accumulators that one member builds up at a time stay near
constexpr int64_t kMargin = 128;          // what a vector may read or write beyond a panel

// How the gradient is cut. Sizes in bytes, multiples of 64.
template <class Config>
struct WeightPlan {
  using E = typename Config::A;
  using Dot = typename DotFor<typename Config::A, typename Config::B, Config::warp_tile_k>::type;
  static_assert(is_same<typename Config::A, typename Config::B>, "both operands are of one type");
  static_assert(Dot::is_float, "there is no gradient of integers");
  static_assert(Config::warp_tile_n % kLanes == 0, "warp_tile_n is a multiple of the vector's 32-bit lanes");
  static constexpr int mr = Config::warp_tile_m, nr = Config::warp_tile_n, depth = Dot::depth;
  static constexpr int team = Config::wave_m * Config::wave_n;
  static constexpr int64_t block = round_up(Config::tile_k, depth), groups = block / depth;
  static constexpr int64_t tile = mr * nr;
  static constexpr int wide = (int)max_of(nr, round_up(mr, 16));  // whole vectors on every level

  int64_t m, n, k, items;
  int64_t slices, length;       // of the pixels
  int64_t row_tiles, col_tiles;  // of one group
  int64_t chunk, chunks;        // columns of tiles that a member takes at a time

  constexpr WeightPlan(const tw_conv_problem& p, int64_t split)
      : m(p.gemm.m), n(p.gemm.n), k(p.gemm.k), items(p.groups) {
    length = slice_length(k, split, Config::tile_k);
    slices = max_of(split, 1);
    row_tiles = ceil_div(m, mr), col_tiles = ceil_div(n, nr);
    const int64_t wanted = 4 * team, has = max_of(items * slices, 1);
    const int64_t parts = team == 1 || has >= wanted ? 1 : ceil_div(wanted, has);
    const int64_t fitting = max_of(kChunkBytes / max_of(row_tiles * tile * 4, 1), 1);
    chunk = max_of(min_of(ceil_div(col_tiles, parts), fitting), 1);
    chunks = ceil_div(col_tiles, chunk);
  }

  constexpr int64_t partial_bytes() const {
    return slices > 1 ? round_up(items * slices * row_tiles * col_tiles * tile * 4, 64) : 0;
  }
  constexpr int64_t a_bytes() const { return round_up(row_tiles * mr * groups * 4 + kMargin, 64); }
  static constexpr int64_t b_bytes = round_up(nr * groups * 4 + kMargin, 64);
  static constexpr int64_t copy_bytes = round_up(block * (wide * size_of<E> + 16) + kMargin, 64);
  static constexpr int64_t table_bytes = round_up((block + depth) * 8, 64);
  constexpr int64_t zero_bytes(int64_t channels) const {
    return round_up(max_of(max_of(channels, m), nr) * size_of<E> + kMargin, 64);
  }
  constexpr int64_t sum_bytes() const { return slices > 1 ? 0 : row_tiles * chunk * tile * 4; }
  constexpr int64_t member_bytes(int64_t channels) const {
    return a_bytes() + b_bytes + 2 * copy_bytes + 2 * table_bytes + zero_bytes(channels) + round_up(sum_bytes(), 64);
  }
};

template <class Config>
constexpr int64_t weight_workspace(const tw_conv_args& args) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < args.count; i++) {
    const WeightPlan<Config> plan(args.problems[i], args.split_k);
    bytes = max_of(bytes, plan.partial_bytes() + plan.team * plan.member_bytes(args.problems[i].channels));
  }
  return bytes;
}

TW_NAMESPACE_END

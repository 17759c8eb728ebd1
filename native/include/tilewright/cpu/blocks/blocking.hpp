// How a GEMM is cut for the caches, and how much scratch memory that takes. The one place where the workspace formula
// stands.
#pragma once
#include "tilewright/core/args/gemm.h"
#include "tilewright/core/options.hpp"
#include "tilewright/cpu/blocks/epilogue.hpp"
#include "tilewright/cpu/blocks/pack.hpp"

TW_NAMESPACE_BEGIN

// The team shares one packed operand, S, and divides the other, P, into slabs that are claimed one by one; whoever
// claims a slab packs it (in pieces of tile_k) into memory of its own and multiplies it with all of S. S is the side
// with the larger tile:
//   tile_n >= tile_m: S = B, up to tile_n columns at a time; slabs of up to tile_m rows of A. For tall problems.
//   tile_n <  tile_m: S = A, up to tile_m rows at a time; slabs of up to tile_n columns of B. For wide ones.
// S is packed for the whole k, so no member ever waits for another inside a slab: one barrier for each tile of S.
constexpr int64_t kSharedBytes = 16 << 20;  // S stays in the last-level cache; a deeper k makes the tile of S narrower
constexpr int64_t kNearBytes = 256 << 10;   // what certainly stays in the second-level cache
constexpr int kSkinny = 8;                  // the streaming kernel: rows of the small operand held at a time,
constexpr int kStreamColumns = 512;         // and results of each that are accumulated at a time

template <class Config, class Rows = LinearRows>
struct Blocking {
  using Dot = typename DotFor<typename Config::A, typename Config::B, Config::warp_tile_k>::type;
  using Out = Epilogue<Config, Dot, Rows>;
  static constexpr int depth = Dot::depth, mr = Config::warp_tile_m, nr = Config::warp_tile_n;
  static constexpr int team = Config::wave_m * Config::wave_n;
  static constexpr bool shares_b = Config::tile_n >= Config::tile_m;
  static constexpr bool streams_b = shares_b;  // pipeline mem: B is the big operand, which is read once
  static constexpr int shared_r = shares_b ? nr : mr, slab_r = shares_b ? mr : nr;
  static constexpr bool shared_is_packed = shares_b && Config::preshuffle,
                        slab_is_packed = !shares_b && Config::preshuffle;
  static constexpr bool intrawave = Config::scheduler == Scheduler::intrawave;
  static constexpr int shared_copies = !intrawave ? team : team > 1 ? 2 : 1;
  static constexpr int64_t block_groups = ceil_div(Config::tile_k, depth);

  // Rows (shares_b: columns) of S packed at a time, for a side of `extent` and `groups` along k.
  static constexpr int64_t shared_length(int64_t extent, int64_t groups) {
    const int64_t tile = max_of(shares_b ? Config::tile_n : Config::tile_m, shared_r) / shared_r * shared_r;
    const int64_t fitting = max_of(kSharedBytes / (4 * max_of(groups, 1)) / shared_r, 1) * shared_r;
    return min_of(round_up(extent, shared_r), min_of(tile, fitting));
  }
  static constexpr int64_t slab_length(int64_t extent) {
    return min_of(round_up(extent, slab_r), round_up(shares_b ? Config::tile_m : Config::tile_n, slab_r));
  }

  struct Sizes {
    int64_t shared = 0, slab = 0, sums = 0,
            partial_tiles = 0;  // bytes: S; one member's slab of P, sums of its columns, its unfinished tiles
    constexpr int64_t of_member() const { return slab + sums + partial_tiles; }
    constexpr void grow_to(const Sizes& other) {
      shared = max_of(shared, other.shared), slab = max_of(slab, other.slab);
      sums = max_of(sums, other.sums), partial_tiles = max_of(partial_tiles, other.partial_tiles);
    }
  };

  // For one problem, k being what one slice of split-K covers.
  static constexpr Sizes sizes(int64_t m, int64_t n, int64_t k) {
    const int64_t groups = ceil_div(k, depth);
    const int64_t shared = shared_length(shares_b ? n : m, groups), slab = slab_length(shares_b ? m : n);
    Sizes s;
    if (!shared_is_packed) s.shared = packed_bytes(shared, k, shared_r, depth, shares_b && Dot::offset_a);
    if (!slab_is_packed) s.slab = round_up(slab * min_of(groups, block_groups) * 4, 64);
    if (!shares_b && Dot::offset_a && !slab_is_packed) s.sums = round_up(slab * 4, 64);
    if (!Out::accumulates_in_c && groups > block_groups) s.partial_tiles = round_up(slab * shared * 4, 64);
    return s;
  }
};

// k covered by one slice of split-K: a multiple of tile_k, so that slices and blocks agree.
constexpr int64_t slice_length(int64_t k, int64_t split, int tile_k) {
  return split <= 1 ? k : round_up(ceil_div(k, split), tile_k);
}

constexpr int64_t split_bytes(const tw_gemm_args& args) {
  if (args.split_k <= 1) return 0;
  int64_t elements = 0;
  for (int64_t p = 0; p < args.count; p++)
    elements += args.problems[p].batch * args.split_k * args.problems[p].m * args.problems[p].n;
  return round_up(elements * 4, 64);
}

// Groups of one packed row for the streaming kernel: whole vectors, so that it may read past the end of k.
template <class Config>
constexpr int64_t streaming_member_bytes(int64_t k) {
  return kSkinny * 4 * round_up(ceil_div(k, Config::warp_tile_k), 16) + kSkinny * 4 * kStreamColumns;
}

// Workspace of a launch in bytes; every part is a multiple of 64:
//   split-K partial sums, 4 * sum over problems of batch * split_k * m * n (none if split_k <= 1), then scratch:
//   mem:                   team * max over problems of streaming_member_bytes
//   compv1:                team * max over problems of (packed A + one packed panel of B)
//   else, intrawave:       (team > 1 ? 2 : 1) * shared + team * (slab + sums + partial_tiles)   (two S: one is packed
//   while the other is still read) else, interwave:       team * (shared + slab + sums + partial_tiles) each of these
//   the largest of any problem
template <class Config>
constexpr int64_t workspace_bytes(const tw_gemm_args& args) {
  using B = Blocking<Config>;
  typename B::Sizes sizes;
  int64_t member = 0;
  for (int64_t p = 0; p < args.count; p++) {
    const tw_gemm_problem& problem = args.problems[p];
    const int64_t k = slice_length(problem.k, args.split_k, Config::tile_k);
    if constexpr (Config::pipeline == Pipeline::mem) member = max_of(member, streaming_member_bytes<Config>(k));
    else if constexpr (Config::pipeline == Pipeline::compv1)
      member = max_of(member, packed_bytes(problem.m, k, B::mr, B::depth, false) +
                                  packed_bytes(B::nr, k, B::nr, B::depth, B::Dot::offset_a));
    else sizes.grow_to(B::sizes(problem.m, problem.n, k));
  }
  return split_bytes(args) + B::shared_copies * sizes.shared + B::team * (sizes.of_member() + member);
}

TW_NAMESPACE_END

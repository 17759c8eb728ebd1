// The portable kernel of products of experts. A generated source unit states a Config and writes
// TW_MOE_KERNEL(symbol, Config). Workgroups stay: each goes through the tiles of all experts with a stride of the grid,
// and finds in `counts` which expert a tile is of.
//
// Launch: Gemm::threads threads, Gemm::shared_bytes of dynamic shared memory, any number of workgroups. The blocks are
// the GEMM's, see gpu/gemm/gemm.hpp.
#pragma once
#include "tilewright/gpu/moe/results.hpp"

namespace tw::gpu {

template <class Config, class Results>
struct MoeResult {
  using type = typename Results::Result;
};
template <class Config>
struct MoeResult<Config, void> {
  using type = typename Config::C;
};

template <class Config, class Results = void>
struct Moe : Gemm<Config> {
  using Base = Gemm<Config>;
  using typename Base::Atom, typename Base::Finish, typename Base::Loop;
  static constexpr bool kFused = !is_same<Results, void>;
  static constexpr int kResultBytes = size_of<typename MoeResult<Config, Results>::type>;
  static_assert(Config::split_k == 1 && !Config::grouped && Config::D::size == 0, "whole products, nothing fused");

  // The experts from `expert` on, of which a wave looks at kWave at a time: a lane has one expert's rows and tiles, and
  // what comes before them.
  struct Experts {
    int expert = 0;             // of lane 0
    uint32_t row = 0, tile = 0;  // before that expert
    uint32_t rows, rows_before, tiles, tiles_before;
    uint32_t rows_all, tiles_all;  // of the experts at hand

    TW_DEVICE void look(const tw_moe_args& args, int columns, int lane) {
      const uint32_t room = (uint32_t)args.product.m, left = args.masked ? room : room - row;
      const int mine = expert + lane;
      const int32_t count = mine < (int)args.product.batch ? args.counts[mine] : 0;
      rows = (uint32_t)moe_cut(count, left);
      // Rows of x that come before, cut to those that there are: so sums stay below 2^32.
      uint32_t end = rows;
      TW_UNROLL
      for (int step = 1; step < kWave; step *= 2) {
        const uint32_t other = shuffle(end, lane - step < 0 ? lane : lane - step);
        if (lane >= step && !args.masked) end = min_of(end + other, left);
      }
      const uint32_t before = shuffle(end, lane == 0 ? 0 : lane - 1);
      rows_before = args.masked || lane == 0 ? 0 : before;
      if (!args.masked) rows = min_of(rows, left - rows_before);
      tiles = ceil_div(rows, (uint32_t)Config::tile_m) * (uint32_t)columns;
      uint32_t last = tiles;
      TW_UNROLL
      for (int step = 1; step < kWave; step *= 2) {
        const uint32_t other = shuffle(last, lane - step < 0 ? lane : lane - step);
        if (lane >= step) last += other;
      }
      tiles_before = last - tiles;
      rows_all = args.masked ? 0 : shuffle(end, kWave - 1);
      tiles_all = shuffle(last, kWave - 1);
    }
    TW_DEVICE void pass() { expert += kWave, row += rows_all, tile += tiles_all; }
  };

  TW_DEVICE static void run_tile(const tw_moe_args& args, int expert, int first, int rows, int index, int columns,
                                 const Where& at) {
    // Tiles of the same columns, whose weights are the same, come one after the other.
    const int high = ceil_div(rows, Config::tile_m), i0 = index % high * Config::tile_m,
              j0 = index / high * Config::tile_n;
    tw_gemm_problem problem = args.product;
    const int64_t item = args.masked ? expert : 0;
    const char* const a =
        (const char*)problem.a + (first * problem.lda + item * problem.stride_a) * Base::TileA::element_bytes;
    const char* const b = (const char*)problem.b + (int64_t)expert * problem.stride_b * Base::TileB::element_bytes;
    problem.c = (char*)problem.c + (first * problem.ldc + item * problem.stride_c) * kResultBytes;
    problem.m = rows;
    problem.alpha = moe_factor(args, expert);
    Atom atom;
    atom.clear();
    if constexpr (kMoeBlocks<Config>) {
      moe_move_scales(problem, args, expert, first);
      Base::add_blocks(atom, problem, 0, 0, (int)problem.k, a, b, i0, j0, at);
    } else {
      const typename Loop::OperandA from_a(a, problem.lda, i0, rows, 0, (int)problem.k);
      const typename Loop::OperandB from_b(b, problem.ldb, j0, (int)problem.n, 0, (int)problem.k);
      Loop::run(atom, from_a, from_b, at);
    }
    if constexpr (kFused) {
      const tw_gemm_operand& scales = args.result_scales;
      barrier();  // the ring is free
      MoeStore<Base, Results>{problem, (char*)problem.c,
                              (float*)scales.ptr + first * scales.row_stride + item * scales.batch_stride,
                              scales.row_stride, scales.col_stride, (int)problem.n / (Results::gated ? 2 : 1)}
          .store(atom, i0, j0, at);
    } else {
      Base::finish_tile(atom, Finish(problem, nullptr, 0, {problem.ldc}), i0, j0, at);
    }
  }

  TW_DEVICE static void run(const tw_moe_args& args) {
    const int thread = thread_index(), wave = thread / kWave, lane = lane_index();
    const Where at = {thread, lane, wave % Config::wave_m * Base::wave_rows, wave / Config::wave_m * Base::wave_columns,
                      shared_base()};
    if (block_index() == 0 && thread == 0) moe_tell(args);
    const int columns = ceil_div((int)args.product.n, Config::tile_n), experts = (int)args.product.batch;
    int64_t work = block_index();
    for (Experts some; some.expert < experts; some.pass()) {
      some.look(read_again(args), columns, lane);
      for (; work < (int64_t)some.tile + some.tiles_all; work += block_count()) {
        const uint32_t within = (uint32_t)(work - some.tile);
        const int place = count_lanes(some.tiles_before + some.tiles <= within);  // lanes before the tile's expert
        const int rows = (int)shuffle(some.rows, place), first = (int)(some.row + shuffle(some.rows_before, place));
        const int index = (int)(within - shuffle(some.tiles_before, place));
        run_tile(read_again(args), some.expert + place, first, rows, index, columns, at);
        barrier();  // shared memory is free
      }
    }
  }
};

}  // namespace tw::gpu

#define TW_MOE_KERNEL(NAME, ...)                 \
  using NAME##_kernel = tw::gpu::Moe<__VA_ARGS__>; \
  TW_KERNEL(NAME##_kernel::threads, NAME##_kernel::min_blocks, NAME, tw_moe_args, NAME##_kernel::run(params);)

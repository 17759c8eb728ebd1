// Products of experts on a CPU. A generated unit states a Config and writes TW_MOE_KERNEL(symbol, Config): the team
// lists the products of all experts that have rows in the workspace, and computes them as a grouped GEMM.
#pragma once
#include "tilewright/cpu/moe/results.hpp"
#include "tilewright/cpu/gemm/gemm.hpp"

TW_NAMESPACE_BEGIN

template <class Config, class Results = void>
struct Moe {
  static constexpr bool fused = !is_same<Results, void>;
  static_assert(!Config::preshuffle && Config::split_k == 1, "whole products of plain weights");

  // The workspace: products, then, where steps follow the sums, those in fp32, and what the product needs.
  static int64_t listed(const tw_moe_args& args) {
    return round_up(args.product.batch * (int64_t)sizeof(tw_gemm_problem), 64);
  }
  static float* sums_of(const tw_moe_args& args) { return (float*)((char*)args.workspace + listed(args)); }
  static int64_t kept(const tw_moe_args& args) {
    const tw_gemm_problem& whole = args.product;
    const int64_t sums = fused ? whole.m * (args.masked ? whole.batch : 1) * whole.n * (int64_t)sizeof(float) : 0;
    return listed(args) + round_up(sums, 64);
  }

  // Products of experts first, first + step, ...; returns how many there are of all.
  static int64_t list(const tw_moe_args& args, tw_gemm_problem* to, int first, int step) {
    const tw_gemm_problem& whole = args.product;
    int64_t count = 0;
    for (MoeWalk at{args}; at.expert < whole.batch; at.next()) {
      at.take(args.counts[at.expert]);
      if (at.rows == 0) continue;
      if (count++ % step != first) continue;
      tw_gemm_problem& product = to[count - 1] = whole;
      const int64_t row = at.before, item = args.masked ? at.expert : 0;
      product.a = (const char*)whole.a + (row * whole.lda + item * whole.stride_a) * size_of<typename Config::A>;
      product.b = (const char*)whole.b + at.expert * whole.stride_b * size_of<typename Config::B>;
      if constexpr (fused) product.c = sums_of(args) + (row + item * whole.m) * whole.n, product.ldc = whole.n;
      else product.c = (char*)whole.c + (row * whole.ldc + item * whole.stride_c) * size_of<typename Config::C>;
      product.m = at.rows, product.batch = 1;
      product.alpha = moe_factor(args, at.expert);
      if constexpr (kMoeBlocks<Config>) moe_move_scales(product, args, at.expert, row);
    }
    return count;
  }

  // Results of every row first, first + step, ...
  static void finish(const tw_moe_args& args, int first, int step) {
    using Result = typename Results::Result;
    const tw_gemm_problem& whole = args.product;
    const tw_gemm_operand& scales = args.result_scales;
    const int64_t columns = Results::gated ? whole.n / 2 : whole.n;
    int64_t number = 0;
    for (MoeWalk at{args}; at.expert < whole.batch; at.next()) {
      at.take(args.counts[at.expert]);
      const int64_t item = args.masked ? at.expert : 0;
      for (int64_t i = at.before; i < at.before + at.rows; i++) {
        if (number++ % step != first) continue;
        MoeFinish<Results>::row(sums_of(args) + (i + item * whole.m) * whole.n, columns,
                                (char*)whole.c + (i * whole.ldc + item * whole.stride_c) * size_of<Result>,
                                (float*)scales.ptr + i * scales.row_stride + item * scales.batch_stride,
                                scales.col_stride);
      }
    }
  }

  static TW_INLINE void run(const tw_moe_args& args, const tw_team* team) {
    Crew crew = crew_of(team, Blocking<Config>::team);
    if (crew.rank >= crew.size) return;
    tw_gemm_problem* const products = (tw_gemm_problem*)args.workspace;
    const int64_t count = list(args, products, crew.rank, crew.size);
    if (crew.rank == 0) moe_tell(args);
    crew.barrier();
    const int64_t before = kept(args);
    const tw_gemm_args all = {products, count, (char*)args.workspace + before, args.workspace_bytes - before, 1};
    Gemm<Config>::run(all, team, false);
    if constexpr (fused) {
      crew.barrier();  // all sums are there
      finish(args, crew.rank, crew.size);
    }
  }
};

TW_NAMESPACE_END

#define TW_MOE_KERNEL(NAME, ...)                                \
  TW_EXPORT void NAME(const void* args, tw_team* team) {        \
    tw::Moe<__VA_ARGS__>::run(*(const tw_moe_args*)args, team); \
  }

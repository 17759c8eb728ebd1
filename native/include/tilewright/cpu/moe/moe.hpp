// Products of experts on a CPU. A generated unit states a Config and writes TW_MOE_KERNEL(symbol, Config): the team
// lists the products of all experts that have rows in the workspace, and computes them as a grouped GEMM.
#pragma once
#include "tilewright/core/moe_rows.hpp"
#include "tilewright/cpu/gemm/gemm.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct Moe {
  static_assert(!Config::preshuffle && Config::split_k == 1, "whole products of plain weights");

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
      product.c = (char*)whole.c + (row * whole.ldc + item * whole.stride_c) * size_of<typename Config::C>;
      product.m = at.rows, product.batch = 1;
      product.alpha = moe_factor(args, at.expert);
      if constexpr (kMoeBlocks<Config>) moe_move_scales(product, args, at.expert, row);
    }
    return count;
  }

  static TW_INLINE void run(const tw_moe_args& args, const tw_team* team) {
    Crew crew = crew_of(team, Blocking<Config>::team);
    if (crew.rank >= crew.size) return;
    tw_gemm_problem* const products = (tw_gemm_problem*)args.workspace;
    const int64_t count = list(args, products, crew.rank, crew.size);
    if (crew.rank == 0) moe_tell(args);
    crew.barrier();
    const int64_t listed = round_up(args.product.batch * (int64_t)sizeof(tw_gemm_problem), 64);
    const tw_gemm_args all = {products, count, (char*)args.workspace + listed, args.workspace_bytes - listed, 1};
    Gemm<Config>::run(all, team, false);
  }
};

TW_NAMESPACE_END

#define TW_MOE_KERNEL(NAME, CONFIG)                      \
  TW_EXPORT void NAME(const void* args, tw_team* team) { \
    tw::Moe<CONFIG>::run(*(const tw_moe_args*)args, team); \
  }

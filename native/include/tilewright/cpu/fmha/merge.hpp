// Attention over a shared prefix and over what follows it become one: both results of a row are weighed by their sums.
//   TW_FMHA_MERGE(name, Config)   name: tw_cpu_kernel with tw_fmha_merge_args as args; o and lse change in place
// Both are o = (P V) / l and lse = log(l) (natural); -inf: the row saw nothing there. Rows without a prefix, and those
// that are skipped or beyond a true length, stay as they are. Heads have any size up to kMost.
#pragma once
#include "tilewright/core/args/fmha_merge.h"
#include "tilewright/core/math.hpp"
#include "tilewright/cpu/fmha/status.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct FmhaMerge {
  using O = typename Config::O;
  static constexpr int kRows = 32, kMost = 1024;

  static TW_INLINE float exp_of(float x) { return exp2(splat(x * kLog2E))[0]; }

  static void run(const tw_fmha_merge_args& given, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);  // needs no scratch memory: any team
    const tw_fmha_args& args = given.args;
    const int64_t blocks = ceil_div(args.seq_q, kRows), pieces = args.batch * args.heads_q * blocks;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t head = piece / blocks, b = head / args.heads_q;
      const FmhaItem item = fmha_item<Config>(args, b);
      if (Config::skip_min && item.skip) continue;
      const int64_t first = piece % blocks * kRows;
      for (int64_t i = first; i < min_of(first + kRows, item.q_rows); i++) {
        const int64_t of_all = Config::varlen ? item.q_first + i : b * args.seq_q + i;
        if (fmha_has_prefix(given, of_all)) row(given, item, b, head % args.heads_q, i, of_all);
      }
    }
    crew.end_stage(pieces);
    if (crew.rank == 0) fmha_join_status(given);
  }

  static TW_NOINLINE void row(const tw_fmha_merge_args& given, const FmhaItem& item, int64_t b, int64_t h, int64_t i,
                              int64_t of_all) {
    const tw_fmha_args& args = given.args;
    const int64_t place = item.q_first + i, items = Config::varlen ? 0 : b;
    float* const lse = (float*)args.lse.ptr + items * args.lse.batch + h * args.lse.head + place * args.lse.row;
    const float other = ((const float*)given.prefix_lse.ptr)[h * given.prefix_lse.head + of_all * given.prefix_lse.row];
    if (other == -__builtin_inff()) return;
    const float own = *lse, most = own > other ? own : other;
    const float mine = exp_of(own - most), its = exp_of(other - most), total = mine + its;
    char* const to = (char*)args.o.ptr + (items * args.o.batch + h * args.o.head + place * args.o.row) * size_of<O>;
    const char* const from =
        (const char*)given.prefix_o.ptr + (h * given.prefix_o.head + of_all * given.prefix_o.row) * size_of<O>;
    alignas(64) float sum[kMost];
    for (int64_t c = 0; c < args.hdim_v; c += kLanes) {
      const int64_t now = min_of(args.hdim_v - c, kLanes);
      f32v x = {};
      if (args.o.col == 1) x = load_f32_partial<O>(to + c * size_of<O>, now);
      else
        for (int64_t k = 0; k < now; k++) x[k] = to_float<O>(to + (c + k) * args.o.col * size_of<O>);
      store_as(sum + c, x * mine + load_f32_partial<O>(from + c * size_of<O>, now) * its);
    }
    fmha_store_line<O>(sum, 1.0f / total, args.hdim_v, to, args.o.col);
    *lse = most + log(splat(total))[0];
  }
};

TW_NAMESPACE_END

#define TW_FMHA_MERGE(NAME, CONFIG)                                     \
  TW_EXPORT void NAME(const void* args, tw_team* team) {                \
    tw::FmhaMerge<CONFIG>::run(*(const tw_fmha_merge_args*)args, team); \
  }

// The second stage of split attention: the parts of a row are weighed by their sums and added, in their order.
//   TW_FMHA_COMBINE(name, Config)   name: tw_cpu_kernel with tw_fmha_args as args; o and lse from o_acc and lse_acc
// Each part is o_acc = (P V) / l of its columns and lse_acc = log(l) (natural); -inf: it saw nothing. Learned sinks enter
// here, once.
#pragma once
#include "tilewright/core/math.hpp"
#include "tilewright/cpu/fmha/status.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct FmhaCombine {
  using O = typename Config::O;
  static constexpr int kRows = 32;

  static TW_INLINE float exp_of(float x) { return exp2(splat(x * kLog2E))[0]; }

  static void run(const tw_fmha_args& args, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);  // needs no scratch memory: any team
    const int64_t blocks = ceil_div(args.seq_q, kRows), pieces = args.batch * args.heads_q * blocks;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t head = piece / blocks, b = head / args.heads_q, h = head % args.heads_q;
      const FmhaItem item = fmha_item<Config>(args, b);
      const int64_t first = piece % blocks * kRows, end = Config::varlen ? item.q_rows : args.seq_q;
      for (int64_t i = first; i < min_of(first + kRows, end); i++)
        row(args, item, b, h, i, i >= item.q_rows || (Config::skip_min && item.skip));
    }
    crew.end_stage(pieces);
  }

  static TW_NOINLINE void row(const tw_fmha_args& args, const FmhaItem& item, int64_t b, int64_t h, int64_t i,
                              bool empty) {
    const int64_t heads = args.heads_q, place = item.q_first + i, items = Config::varlen ? 0 : b;
    const int64_t row = Config::varlen ? h * args.total_q + place : (b * heads + h) * args.seq_q + i;
    const int64_t step = Config::varlen ? heads * args.total_q : args.batch * heads * args.seq_q;
    const float sink = Config::learned_sinks && !empty ? args.sinks[h] : -__builtin_inff();
    alignas(64) float sum[round_up(Config::hdim_v, 16)] = {};
    float most = sink, total = 0;
    if (!empty)
      for (int64_t s = 0; s < args.splits; s++) {
        const float own = args.lse_acc[row + s * step];
        most = own > most ? own : most;
      }
    const float safe = most == -__builtin_inff() ? 0.0f : most;
    if (Config::learned_sinks && sink > -__builtin_inff()) total = exp_of(sink - safe);
    for (int64_t s = 0; s < (empty ? 0 : args.splits); s++) {
      const float weight = exp_of(args.lse_acc[row + s * step] - safe);
      if (weight == 0.0f) continue;  // it saw nothing
      total += weight;
      const float* const from = args.o_acc + (row + s * step) * Config::hdim_v;
      for (int64_t c = 0; c < Config::hdim_v; c += kLanes)
        store_as(sum + c, load_as<f32v>(sum + c) + weight * load_f32_partial<fp32>(from + c, Config::hdim_v - c));
    }
    fmha_store_line<O>(total == 0.0f ? nullptr : sum, 1.0f / total, args.hdim_v,
                       (char*)args.o.ptr + (items * args.o.batch + h * args.o.head + place * args.o.row) * size_of<O>,
                       args.o.col);
    if constexpr (Config::lse)
      ((float*)args.lse.ptr)[items * args.lse.batch + h * args.lse.head + place * args.lse.row] =
          total == 0.0f ? -__builtin_inff() : most + log(splat(total))[0];
  }
};

TW_NAMESPACE_END

#define TW_FMHA_COMBINE(NAME, CONFIG)                               \
  TW_EXPORT void NAME(const void* args, tw_team* team) {            \
    tw::FmhaCombine<CONFIG>::run(*(const tw_fmha_args*)args, team); \
  }

// Preparation of the gradients: delta = rowsum(do * o) of every query, zeros in dq_acc and dbias_acc, and the gradients
// of learned sinks, -sum of 2^((sink - lse) log2(e)) * delta.
//   TW_FMHA_DOT_DO_O(name, Config)   name: tw_cpu_kernel with tw_fmha_args as args
#pragma once
#include "tilewright/core/math.hpp"
#include "tilewright/cpu/fmha/status.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct FmhaDot {
  using O = typename Config::O;
  static constexpr int kRows = 64, kCleared = 4096;

  static void run(const tw_fmha_args& args, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);  // needs no scratch memory: any team
    const int64_t blocks = ceil_div(args.seq_q, kRows), pieces = args.batch * args.heads_q * blocks;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t head = piece / blocks, b = head / args.heads_q, h = head % args.heads_q;
      const FmhaItem item = fmha_item<Config>(args, b);
      const int64_t first = piece % blocks * kRows, end = Config::varlen ? item.q_rows : args.seq_q;
      for (int64_t i = first; i < min_of(first + kRows, end); i++)
        row(args, item, b, h, i, i < item.q_rows && !(Config::skip_min && item.skip));
    }
    crew.end_stage(pieces);
    if constexpr (Config::dbias) {
      const tw_fmha_tensor& to = args.dbias;
      const int64_t size = (to.batch ? args.batch : 1) * (to.head ? args.heads_q : 1) * (to.row ? args.seq_q : 1) *
                           (to.col ? args.seq_k : args.splits);
      const int64_t chunks = ceil_div(size, kCleared);
      for (int64_t chunk; (chunk = crew.claim(chunks)) >= 0;)
        __builtin_memset(args.dbias_acc + chunk * kCleared, 0, (size_t)min_of(size - chunk * kCleared, kCleared) * 4);
      crew.end_stage(chunks);
    }
    if constexpr (Config::learned_sinks) {
      if (!args.dsinks) return;
      crew.barrier();  // every delta is there
      for (int64_t h; (h = crew.claim(args.heads_q)) >= 0;) sink(args, h);
      crew.end_stage(args.heads_q);
    }
  }

  static TW_INLINE int64_t line_of(const tw_fmha_args& args, const FmhaItem& item, int64_t b, int64_t h, int64_t i) {
    return Config::varlen ? h * args.total_q + item.q_first + i : (b * args.heads_q + h) * args.seq_q + i;
  }

  static TW_NOINLINE void row(const tw_fmha_args& args, const FmhaItem& item, int64_t b, int64_t h, int64_t i, bool live) {
    const int64_t line = line_of(args, item, b, h, i), items = Config::varlen ? 0 : b, place = item.q_first + i;
    f32v sum = {};
    if (live) {
      const tw_fmha_tensor &o = args.o, &d = args.d_o;
      const char* const x = (const char*)o.ptr + (items * o.batch + h * o.head + place * o.row) * size_of<O>;
      const char* const y = (const char*)d.ptr + (items * d.batch + h * d.head + place * d.row) * size_of<O>;
      for (int64_t c = 0; c < args.hdim_v; c += kLanes)
        sum += elements(x, o.col, c, args.hdim_v - c) * elements(y, d.col, c, args.hdim_v - c);
    }
    args.delta[line] = sum_lanes(sum);
    const int64_t lines = Config::varlen ? args.total_q * args.heads_q : args.batch * args.heads_q * args.seq_q;
    for (int64_t s = 0; s < args.splits; s++)
      __builtin_memset(args.dq_acc + (s * lines + line) * Config::hdim_q, 0, (size_t)Config::hdim_q * 4);
  }

  static TW_INLINE f32v elements(const char* row, int64_t col, int64_t c, int64_t count) {
    if (col == 1) return load_f32_partial<O>(row + c * size_of<O>, min_of(count, kLanes));
    f32v x = {};
    for (int64_t k = 0; k < min_of(count, kLanes); k++) x[k] = to_float<O>(row + (c + k) * col * size_of<O>);
    return x;
  }

  static TW_NOINLINE void sink(const tw_fmha_args& args, int64_t h) {
    double sum = 0;
    for (int64_t b = 0; b < args.batch; b++) {
      const FmhaItem item = fmha_item<Config>(args, b);
      const float* const lse = (const float*)args.lse.ptr + (Config::varlen ? 0 : b) * args.lse.batch + h * args.lse.head;
      for (int64_t i = 0; i < (Config::skip_min && item.skip ? 0 : item.q_rows); i++) {
        const float x = lse[(item.q_first + i) * args.lse.row];
        if (x == -__builtin_inff()) continue;
        sum -= (double)exp(splat(args.sinks[h] - x))[0] * args.delta[line_of(args, item, b, h, i)];
      }
    }
    args.dsinks[h] = (float)sum;
  }
};

TW_NAMESPACE_END

#define TW_FMHA_DOT_DO_O(NAME, CONFIG)                          \
  TW_EXPORT void NAME(const void* args, tw_team* team) {        \
    tw::FmhaDot<CONFIG>::run(*(const tw_fmha_args*)args, team); \
  }

// The last stage of the gradients: slices of dq_acc are added in their order, scaled and rounded to dq, and dbias_acc is
// rounded to dbias.
//   TW_FMHA_CONVERT_DQ(name, Config)   name: tw_cpu_kernel with tw_fmha_args as args
#pragma once
#include "tilewright/cpu/fmha/status.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct FmhaConvert {
  using Q = typename Config::Q;
  using Bias = typename Config::Bias;
  static constexpr int kRows = 64;

  static void run(const tw_fmha_args& args, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);  // needs no scratch memory: any team
    const int64_t blocks = ceil_div(args.seq_q, kRows), pieces = args.batch * args.heads_q * blocks;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t head = piece / blocks, b = head / args.heads_q, h = head % args.heads_q;
      const FmhaItem item = fmha_item<Config>(args, b);
      const int64_t first = piece % blocks * kRows, end = Config::varlen ? item.q_rows : args.seq_q;
      for (int64_t i = first; i < min_of(first + kRows, end); i++) row(args, item, b, h, i);
    }
    crew.end_stage(pieces);
    if constexpr (Config::dbias) {
      const tw_fmha_tensor& to = args.dbias;
      const int64_t heads = to.head ? args.heads_q : 1, rows = to.row ? args.seq_q : 1;
      const int64_t lines = (to.batch ? args.batch : 1) * heads * rows;
      for (int64_t line; (line = crew.claim(lines)) >= 0;) {
        const int64_t r = line % rows, h = line / rows % heads, b = line / rows / heads;
        bias(args, line, lines, (char*)to.ptr + (b * to.batch + h * to.head + r * to.row) * size_of<Bias>);
      }
      crew.end_stage(lines);
    }
  }

  static TW_NOINLINE void row(const tw_fmha_args& args, const FmhaItem& item, int64_t b, int64_t h, int64_t i) {
    const int64_t items = Config::varlen ? 0 : b, place = item.q_first + i;
    const int64_t line = Config::varlen ? h * args.total_q + place : (b * args.heads_q + h) * args.seq_q + i;
    const int64_t lines = Config::varlen ? args.total_q * args.heads_q : args.batch * args.heads_q * args.seq_q;
    alignas(64) float sum[Config::hdim_q];
    for (int64_t c = 0; c < Config::hdim_q; c += kLanes) {
      f32v x = {};
      for (int64_t s = 0; s < args.splits; s++) x += load_as<f32v>(args.dq_acc + (s * lines + line) * Config::hdim_q + c);
      store_as(sum + c, x);
    }
    const tw_fmha_tensor& to = args.dq;
    fmha_store_line<Q>(sum, (float)args.scale, args.hdim_q,
                       (char*)to.ptr + (items * to.batch + h * to.head + place * to.row) * size_of<Q>, to.col);
  }

  // One line of dbias. One of a single column has a copy for each slice.
  static TW_NOINLINE void bias(const tw_fmha_args& args, int64_t line, int64_t lines, char* to) {
    const int64_t columns = args.dbias.col ? args.seq_k : 1, copies = args.dbias.col ? 1 : args.splits;
    const float* const from = args.dbias_acc + line * columns;
    for (int64_t c = 0; c < columns; c += kLanes) {
      f32v x = {};
      for (int64_t s = 0; s < copies; s++) x += load_f32_partial<fp32>(from + s * lines * columns + c, columns - c);
      alignas(64) float values[kLanes];
      store_as(values, x);
      fmha_store_line<Bias>(values, 1.0f, min_of(columns - c, kLanes), to + c * args.dbias.col * size_of<Bias>,
                            args.dbias.col);
    }
  }
};

TW_NAMESPACE_END

#define TW_FMHA_CONVERT_DQ(NAME, CONFIG)                            \
  TW_EXPORT void NAME(const void* args, tw_team* team) {            \
    tw::FmhaConvert<CONFIG>::run(*(const tw_fmha_args*)args, team); \
  }

// The second stage of split attention: the parts of a row are weighed by their sums and added, in their order.
//   TW_FMHA_COMBINE_KERNEL(symbol, Config)   its only parameter is tw_fmha_args; a workgroup for 32 rows of a head
// Each part is o_acc = (P V) / l of its columns and lse_acc = log(l) (natural); -inf: it saw nothing. Learned sinks enter
// here, once.
#pragma once
#include "tilewright/gpu/fmha_params.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaCombine {
  using O = typename Config::O;
  static constexpr int threads = 128, min_blocks = 1, rows = 32, shared_bytes = 0;
  static constexpr int columns = 8, per_row = Config::hdim_v / columns;
  static_assert(Config::hdim_v % columns == 0, "a thread has 8 columns");

  TW_DEVICE static float exp_of(float x) { return exp2(x * kLog2E); }

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const int thread = thread_index(), blocks = ceil_div((int)args.seq_q, rows);
    const int id = block_index(), first = id % blocks * rows, h = id / blocks % (int)args.heads_q;
    const int b = id / blocks / (int)args.heads_q;
    const FmhaItem item = fmha_item<Config>(args, b);
    const int end = min_of(first + rows, (int)(Config::varlen ? item.q_rows : args.seq_q));
    TW_NO_UNROLL
    for (int at = thread; at < rows * per_row; at += threads) {
      const int i = first + at / per_row, c = at % per_row * columns;
      if (i < end) add(args, item, b, h, i, c, i >= (int)item.q_rows || (Config::skip_min && item.skip));
    }
  }

  TW_DEVICE static void add(const tw_fmha_args& args, const FmhaItem& item, int b, int h, int i, int c, bool empty) {
    const int64_t heads = args.heads_q, place = item.q_first + i, items = Config::varlen ? 0 : b;
    const int64_t row = Config::varlen ? h * args.total_q + place : (b * heads + h) * args.seq_q + i;
    const int64_t step = Config::varlen ? heads * args.total_q : args.batch * heads * args.seq_q;
    const int splits = empty ? 0 : (int)args.splits;
    float most = minus_infinity(), total = 0.0f, sum[columns] = {};
    if constexpr (Config::learned_sinks)
      if (!empty) most = load_constant<float>(args.sinks + h);
    const float sink = most;
    for (int s = 0; s < splits; s++) {
      const float lse = load_constant<float>(args.lse_acc + row + s * step);
      most = lse > most ? lse : most;
    }
    const float safe = most == minus_infinity() ? 0.0f : most;
    if (Config::learned_sinks && sink != minus_infinity()) total = exp_of(sink - safe);
    TW_NO_UNROLL
    for (int s = 0; s < splits; s++) {
      const float lse = load_constant<float>(args.lse_acc + row + s * step);
      if (lse == minus_infinity()) continue;  // it saw nothing
      const float weight = exp_of(lse - safe);
      total += weight;
      const float* const from = args.o_acc + (row + s * step) * Config::hdim_v + c;
      TW_UNROLL
      for (int e = 0; e < columns; e += 4) {
        const Words<4> w = load_constant<Words<4>>(from + e);
        TW_UNROLL
        for (int l = 0; l < 4; l++) sum[e + l] = fma(weight, float_of(w.w[l]), sum[e + l]);
      }
    }
    TW_UNROLL
    for (int e = 0; e < columns; e++) sum[e] = total == 0.0f ? 0.0f : sum[e] / total;
    const int64_t at = items * args.o.batch + h * args.o.head + place * args.o.row + c * args.o.col;
    fmha_store_run<O>((char*)args.o.ptr + at * size_of<O>, sum, (int)args.hdim_v - c, args.o.col);
    if constexpr (Config::lse)
      if (c == 0)
        store_global((float*)args.lse.ptr + items * args.lse.batch + h * args.lse.head + place * args.lse.row,
                     total == 0.0f ? minus_infinity() : most + log2(total) * kLn2);
  }
};

}  // namespace tw::gpu

#define TW_FMHA_COMBINE_KERNEL(NAME, ...)                                                          \
  TW_KERNEL(tw::gpu::FmhaCombine<__VA_ARGS__>::threads, tw::gpu::FmhaCombine<__VA_ARGS__>::min_blocks, NAME, \
            tw_fmha_args, tw::gpu::FmhaCombine<__VA_ARGS__>::run(params);)

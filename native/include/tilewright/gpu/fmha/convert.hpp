// The last stage of the gradients: slices of dq_acc are added in their order, scaled and rounded to dq, and dbias_acc
// is rounded to dbias.
//   TW_FMHA_CONVERT_DQ_KERNEL(symbol, Config)   its only parameter is tw_fmha_args; a workgroup for 64 rows of a head
#pragma once
#include "tilewright/gpu/fmha/backward/gradient.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaConvert {
  using Q = typename Config::Q;
  using Bias = typename Config::Bias;
  static constexpr int threads = 128, min_blocks = 1, rows = 64, shared_bytes = 0, per_row = Config::hdim_q / 4;

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const int thread = thread_index(), blocks = max_of(ceil_div((int)args.seq_q, rows), 1), id = block_index();
    const int first = id % blocks * rows, h = id / blocks % (int)args.heads_q, b = id / blocks / (int)args.heads_q;
    const FmhaItem item = fmha_item<Config>(args, b);
    const int end = min_of(first + rows, (int)(Config::varlen ? item.q_rows : args.seq_q));
    const int64_t items = Config::varlen ? 0 : b, slice = fmha_lines<Config>(args) * Config::hdim_q;
    constexpr int kAtOnce = 4, kQuads = rows * per_row;  // reads on their way
    TW_NO_UNROLL
    for (int base = thread; base < kQuads; base += threads * kAtOnce) {
      float sum[kAtOnce][4] = {};
      TW_NO_UNROLL
      for (int s = 0; s < (int)args.splits; s++)
        TW_UNROLL
        for (int u = 0; u < kAtOnce; u++) {
          const int at = base + u * threads, i = first + at / per_row;
          if (at >= kQuads || i >= end) continue;
          const int64_t line = s * slice + fmha_line_of<Config>(args, item, b, h, i) * Config::hdim_q;
          const Words<4> w = load_constant<Words<4>>(args.dq_acc + line + at % per_row * 4);
          TW_UNROLL
          for (int e = 0; e < 4; e++) sum[u][e] += float_of(w.w[e]);
        }
      TW_UNROLL
      for (int u = 0; u < kAtOnce; u++) {
        const int at = base + u * threads;
        const int i = first + at / per_row;
        if (at < kQuads && i < end) store(args, item, items, h, i, at % per_row * 4, sum[u]);
      }
    }
    if (args.dsinks && first == 0 && b == 0 && thread < kWave) sink(args, h, thread);
    if constexpr (Config::dbias) {
      const tw_fmha_tensor& to = args.dbias;
      const int64_t heads = to.head ? args.heads_q : 1, lines = to.row ? args.seq_q : 1;
      const int64_t columns = to.col ? args.seq_k : 1, copies = to.col ? 1 : args.splits;
      const int64_t size = (to.batch ? args.batch : 1) * heads * lines * columns;
      for (int64_t at = (int64_t)id * threads + thread; at < size; at += (int64_t)block_count() * threads) {
        float sum = 0.0f;
        for (int64_t s = 0; s < copies; s++) sum += load_constant<float>(args.dbias_acc + s * size + at);
        const int64_t c = at % columns, r = at / columns % lines, of = at / columns / lines;
        const int64_t place = of / heads * to.batch + of % heads * to.head + r * to.row + c * to.col;
        store_global<typename Bias::storage>((char*)to.ptr + place * size_of<Bias>, from_float<Bias>(sum));
      }
    }
  }

  // Stores the element at place c of row i.
  TW_DEVICE static void store(const tw_fmha_args& args, const FmhaItem& item, int64_t b, int h, int i, int c,
                              const float (&sum)[4]) {
    const tw_fmha_tensor& to = args.dq;
    char* const line = (char*)to.ptr + (b * to.batch + h * to.head + (item.q_first + i) * to.row) * size_of<Q>;
    const float scale = (float)args.scale;
    TW_UNROLL
    for (int e = 0; e < 4; e += 2) {
      const int column = FmhaQueryPlace<Config>::column(c + e);
      const float two[2] = {sum[e] * scale, sum[e + 1] * scale};
      fmha_store_run<Q>(line + column * to.col * size_of<Q>, two, (int)args.hdim_q - column, to.col);
    }
  }

  // The gradient of a learned sink, -sum of 2^((sink - lse) log2(e)) * delta over all items, by one wave.
  TW_DEVICE static void sink(const tw_fmha_args& args, int h, int lane) {
    const float own = load_constant<float>(args.sinks + h);
    float sum = 0.0f;
    TW_NO_UNROLL
    for (int b = 0; b < (int)args.batch; b++) {
      const FmhaItem item = fmha_item<Config>(args, b);
      const int64_t from = (Config::varlen ? 0 : b) * args.lse.batch + h * args.lse.head;
      TW_NO_UNROLL
      for (int i = lane; i < (int)item.q_rows; i += kWave) {  // delta of items that are skipped is 0
        const float lse = load_constant<float>((const float*)args.lse.ptr + from + (item.q_first + i) * args.lse.row);
        if (lse == minus_infinity()) continue;
        const float delta = load_constant<float>(args.delta + fmha_line_of<Config>(args, item, b, h, i));
        sum -= exp2((own - lse) * kLog2E) * delta;
      }
    }
    TW_UNROLL
    for (int mask = kWave / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (lane == 0) store_global(args.dsinks + h, sum);
  }
};

}  // namespace tw::gpu

#define TW_FMHA_CONVERT_DQ_KERNEL(NAME, ...)                                                                 \
  TW_KERNEL(tw::gpu::FmhaConvert<__VA_ARGS__>::threads, tw::gpu::FmhaConvert<__VA_ARGS__>::min_blocks, NAME, \
            tw_fmha_args, tw::gpu::FmhaConvert<__VA_ARGS__>::run(params);)

// The last stage of the gradients: slices of dq_acc are added in their order, scaled and rounded to dq, and dbias_acc is
// rounded to dbias.
//   TW_FMHA_CONVERT_DQ_KERNEL(symbol, Config)   its only parameter is tw_fmha_args; a workgroup for 64 rows of a head
#pragma once
#include "tilewright/gpu/fmha_dot.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaConvert {
  using Q = typename Config::Q;
  using Bias = typename Config::Bias;
  static constexpr int threads = 128, min_blocks = 1, rows = 64, shared_bytes = 0, per_row = Config::hdim_q / 4;

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const int thread = thread_index(), blocks = ceil_div((int)args.seq_q, rows), id = block_index();
    const int first = id % blocks * rows, h = id / blocks % (int)args.heads_q, b = id / blocks / (int)args.heads_q;
    const FmhaItem item = fmha_item<Config>(args, b);
    const int end = min_of(first + rows, (int)(Config::varlen ? item.q_rows : args.seq_q));
    const int64_t items = Config::varlen ? 0 : b, slice = fmha_lines<Config>(args) * Config::hdim_q;
    TW_NO_UNROLL
    for (int at = thread; at < rows * per_row; at += threads) {
      const int i = first + at / per_row, c = at % per_row * 4;
      if (i >= end) continue;
      const float* const from = args.dq_acc + fmha_line_of<Config>(args, item, b, h, i) * Config::hdim_q + c;
      float sum[4] = {};
      for (int64_t s = 0; s < args.splits; s++) {
        const Words<4> w = load_constant<Words<4>>(from + s * slice);
        TW_UNROLL
        for (int e = 0; e < 4; e++) sum[e] += float_of(w.w[e]);
      }
      TW_UNROLL
      for (int e = 0; e < 4; e++) sum[e] *= (float)args.scale;
      const tw_fmha_tensor& to = args.dq;
      const int64_t place = items * to.batch + h * to.head + (item.q_first + i) * to.row + c * to.col;
      fmha_store_run<Q>((char*)to.ptr + place * size_of<Q>, sum, (int)args.hdim_q - c, to.col);
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

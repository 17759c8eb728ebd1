// The second stage of split attention: the parts of a row are weighed by their sums and added, in a fixed order.
//   TW_FMHA_COMBINE_KERNEL(symbol, Config)   its only parameter is tw_fmha_args; a workgroup for each row of a head
// Each part is o_acc = (P V) / l of its columns and lse_acc = log(l) (natural); -inf: it saw nothing, and o_acc is zero.
// Learned sinks enter here, once. Groups of threads, a row's columns each, share out the parts, so that all reads of a
// row are on their way at once.
#pragma once
#include "tilewright/gpu/fmha/params.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaCombine {
  using O = typename Config::O;
  static constexpr int threads = 128, min_blocks = 1, columns = 8, per_row = Config::hdim_v / columns;
  static constexpr int groups = threads / per_row, shared_bytes = groups * Config::hdim_v * 4;
  static_assert(Config::hdim_v % columns == 0 && groups > 0, "a thread has 8 columns");

  TW_DEVICE static float exp_of(float x) { return exp2(x * kLog2E); }

  TW_DEVICE static void run(const tw_fmha_args& args) {
    fmha_wait_for_previous();
    const int id = block_index(), i = id % (int)args.seq_q, h = id / (int)args.seq_q % (int)args.heads_q;
    const int b = id / (int)args.seq_q / (int)args.heads_q;
    const FmhaItem item = fmha_item<Config>(args, b);
    if (Config::varlen && i >= (int)item.q_rows) return;
    const bool empty = i >= (int)item.q_rows || (Config::skip_min && item.skip);
    add(args, item, b, h, i, empty ? 0 : (int)args.splits, thread_index());
  }

  TW_DEVICE static void add(const tw_fmha_args& args, const FmhaItem& item, int b, int h, int i, int splits, int thread) {
    const int64_t heads = args.heads_q, place = item.q_first + i, items = Config::varlen ? 0 : b;
    const int64_t row = Config::varlen ? h * args.total_q + place : (b * heads + h) * args.seq_q + i;
    const int64_t step = Config::varlen ? heads * args.total_q : args.batch * heads * args.seq_q;
    const int group = thread / per_row, c = thread % per_row * columns;

    // The first parts of each group are on their way while the row's maximum is found. (Coherent reads: the launch that
    // writes them may still run when this one begins.)
    struct Part {
      float lse;
      Words<4> o[columns / 4];
    };
    const auto load = [&](Part& part, int s) {
      part.lse = float_of(load_coherent<1>(args.lse_acc + row + s * step).w[0]);
      TW_UNROLL
      for (int e = 0; e < columns / 4; e++)
        part.o[e] = load_coherent<4>(args.o_acc + (row + s * step) * Config::hdim_v + c + e * 4);
    };
    constexpr int kEarly = 4;
    Part early[kEarly];
    TW_UNROLL
    for (int n = 0; n < kEarly; n++)
      if (group < groups && group + n * groups < splits) load(early[n], group + n * groups);

    // Every wave finds it by itself.
    constexpr int kHeld = 2;
    float held[kHeld], most = minus_infinity(), sink = minus_infinity(), total = 0.0f, sum[columns] = {};
    const auto lse_of = [&](int s) {
      return s < splits ? float_of(load_coherent<1>(args.lse_acc + row + s * step).w[0]) : minus_infinity();
    };
    if constexpr (Config::learned_sinks)
      if (splits > 0) most = sink = load_constant<float>(args.sinks + h);
    TW_UNROLL
    for (int n = 0; n < kHeld; n++) held[n] = lse_of(lane_index() + n * kWave);
    TW_UNROLL
    for (int n = 0; n < kHeld; n++) most = fmha_larger(most, held[n]);
    for (int s = lane_index() + kHeld * kWave; s < splits; s += kWave) most = fmha_larger(most, lse_of(s));
    TW_UNROLL
    for (int mask = kWave / 2; mask > 0; mask /= 2) most = fmha_larger(most, shuffle_xor(most, mask));
    const float safe = most == minus_infinity() ? 0.0f : most;
    TW_UNROLL
    for (int n = 0; n < kHeld; n++) total += exp_of(held[n] - safe);
    for (int s = lane_index() + kHeld * kWave; s < splits; s += kWave) total += exp_of(lse_of(s) - safe);
    TW_UNROLL
    for (int mask = kWave / 2; mask > 0; mask /= 2) total += shuffle_xor(total, mask);
    if (Config::learned_sinks && sink != minus_infinity()) total += exp_of(sink - safe);

    const auto add_part = [&](const Part& part) {
      const float weight = exp_of(part.lse - safe);
      TW_UNROLL
      for (int e = 0; e < columns; e++) sum[e] = fma(weight, float_of(part.o[e / 4].w[e % 4]), sum[e]);
    };
    if (group < groups) {
      TW_UNROLL
      for (int n = 0; n < kEarly; n++)
        if (group + n * groups < splits) add_part(early[n]);
      TW_UNROLL_BY(2)
      for (int s = group + kEarly * groups; s < splits; s += groups) {
        Part part;
        load(part, s);
        add_part(part);
      }
      const uint32_t to = shared_base() + (group * Config::hdim_v + c) * 4;
      TW_UNROLL
      for (int e = 0; e < columns; e += 4)
        store_shared(to + e * 4, Words<4>{bits_of(sum[e]), bits_of(sum[e + 1]), bits_of(sum[e + 2]), bits_of(sum[e + 3])});
    }
    barrier();
    if (group != 0) return;
    TW_UNROLL_BY(4)
    for (int g = 1; g < groups; g++)
      TW_UNROLL
      for (int e = 0; e < columns; e += 4) {
        const Words<4> w = load_shared<4>(shared_base() + (g * Config::hdim_v + c + e) * 4);
        TW_UNROLL
        for (int l = 0; l < 4; l++) sum[e + l] += float_of(w.w[l]);
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

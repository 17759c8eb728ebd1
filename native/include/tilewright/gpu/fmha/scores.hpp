// Scores or probabilities in memory, of which attention itself keeps blocks only: for who asks to see them.
//   TW_FMHA_SCORES_KERNEL(symbol, Config)   its only parameter is tw_fmha_scores_args; a workgroup for 16 queries and 64
//                                           keys of a head of an item
// Heads have any size. A thread has one key and eight queries; both come through shared memory as fp32.
#pragma once
#include "tilewright/core/args/fmha_scores.h"
#include "tilewright/gpu/fmha/softmax.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaScores {
  using Q = typename Config::Q;
  using K = typename Config::K;
  using Bias = typename Config::Bias;
  static constexpr int threads = 128, min_blocks = 1, rows = 16, columns = 64, depth = 32;
  static constexpr int each = rows * columns / threads, line = depth + 1;  // neighbouring lines in different banks
  static constexpr int shared_bytes = (rows + columns) * line * 4;

  TW_DEVICE static void run(const tw_fmha_scores_args& given) {
    const tw_fmha_args& args = given.args;
    const tw_fmha_tensor& to = given.to;
    const int64_t what = given.what;
    const bool as_bias = what >= kFmhaAdded;
    const int across = max_of(ceil_div((int)args.seq_k, columns), 1), down = max_of(ceil_div((int)args.seq_q, rows), 1);
    const int thread = thread_index(), id = block_index();
    const int c0 = id % across * columns, i0 = id / across % down * rows;
    const int h = id / across / down % (int)args.heads_q, b = id / across / down / (int)args.heads_q;
    const FmhaItem item = fmha_item<Config>(args, b);
    const int column = thread % columns, row0 = thread / columns * each;
    float sum[each] = {};
    if (what != kFmhaAdded) multiply(args, item, b, h, i0, c0, column, row0, sum);
    const int j = c0 + column;
    if (j >= (int)args.seq_k) return;
    const int end = Config::varlen && !as_bias ? (int)item.q_rows : (int)args.seq_q;
    TW_UNROLL
    for (int r = 0; r < each; r++) {
      const int i = i0 + row0 + r;
      if (i >= end) continue;
      const int64_t place = (Config::varlen && !as_bias ? 0 : b) * to.batch + h * to.head +
                            ((as_bias ? 0 : item.q_first) + i) * to.row + j * to.col;
      store_global((float*)to.ptr + place, finish(args, item, what, b, h, i, j, sum[r]));
    }
  }

  TW_DEVICE static void multiply(const tw_fmha_args& args, const FmhaItem& item, int b, int h, int i0, int c0,
                                 int column, int row0, float (&sum)[each]) {
    const int thread = thread_index(), hk = h / (int)(args.heads_q / args.heads_k);
    const uint32_t queries = shared_base(), keys = queries + rows * line * 4;
    const char* const q = (const char*)args.q.ptr + ((Config::varlen ? 0 : b) * args.q.batch + h * args.q.head +
                                                     (item.q_first + i0) * args.q.row) * size_of<Q>;
    const char* const k = (const char*)args.k.ptr + hk * args.k.head * size_of<K>;
    const int64_t k_batch = Config::varlen ? 0 : item.cache * args.k.batch;
    const int live_q = (int)item.q_rows - i0, live_k = (int)item.k_rows - c0, hdim = (int)args.hdim_q;
    TW_NO_UNROLL
    for (int d0 = 0; d0 < hdim; d0 += depth) {
      barrier();  // nobody reads the last ones any more
      TW_NO_UNROLL
      for (int n = thread; n < rows * depth; n += threads)
        fetch<Q>(queries, n / depth, n / depth < live_q, q + n / depth * args.q.row * size_of<Q>, args.q, n % depth, d0,
                 hdim);
      TW_NO_UNROLL
      for (int n = thread; n < columns * depth; n += threads) {
        const int r = n / depth, j = c0 + r;
        bool live = r < live_k;
        int64_t at = k_batch + (item.k_first + j) * args.k.row;
        if constexpr (Config::paged) {
          const int64_t page = live ? fmha_page<Config>(args, b, j) : -1;
          live = page >= 0;
          at = page * args.k.batch + j % (int)(Config::page_size > 0 ? Config::page_size : args.page_size) * args.k.row;
        }
        fetch<K>(keys, r, live, k + at * size_of<K>, args.k, n % depth, d0, hdim);
      }
      barrier();
      TW_UNROLL_BY(4)
      for (int c = 0; c < depth; c++) {
        const float key = float_of(load_shared<1>(keys + (column * line + c) * 4).w[0]);
        TW_UNROLL
        for (int r = 0; r < each; r++)
          sum[r] = fma(float_of(load_shared<1>(queries + ((row0 + r) * line + c) * 4).w[0]), key, sum[r]);
      }
    }
  }

  template <class E>
  TW_DEVICE static void fetch(uint32_t to, int r, bool live, const char* line_begin, const tw_fmha_tensor& tensor, int c,
                              int d0, int hdim) {
    float x = 0.0f;
    if (live && d0 + c < hdim)
      x = to_float<E>(load_constant<typename E::storage>(line_begin + (d0 + c) * tensor.col * size_of<E>));
    store_shared(to + (r * line + c) * 4, Words<1>{bits_of(x)});
  }

  // From the product of query i and key j to what is asked for.
  TW_DEVICE static float finish(const tw_fmha_args& args, const FmhaItem& item, int64_t what, int b, int h, int i, int j,
                                float x) {
    const bool live = i < (int)item.q_rows && j < (int)item.k_rows;
    if (!live && what != kFmhaAdded) return what == kFmhaMasked ? minus_infinity() : 0.0f;
    x *= (float)args.scale;
    if (what == kFmhaScaled) return x;
    if (args.softcap > 0 && what != kFmhaAdded) x = fmha_tanh(x / (float)args.softcap) * (float)args.softcap;
    if (what == kFmhaCapped) return x;
    if (args.bias.ptr) {
      const int64_t at = b * args.bias.batch + h * args.bias.head + i * args.bias.row + j * args.bias.col;
      x += to_float<Bias>(load_constant<typename Bias::storage>((const char*)args.bias.ptr + at * size_of<Bias>));
    }
    if (args.slopes) {
      const int distance = i + (int)item.off - j;
      x -= load_constant<float>(args.slopes + b * args.slope_batch + h) * (float)(distance < 0 ? -distance : distance);
    }
    if (what == kFmhaAdded || what == kFmhaOpen) return x;
    if (!fmha_visible(args, item, i, j)) return what == kFmhaMasked ? minus_infinity() : 0.0f;
    if (what == kFmhaMasked) return x;
    const float lse = load_global<float>((const float*)args.lse.ptr + (Config::varlen ? 0 : b) * args.lse.batch +
                                         h * args.lse.head + (item.q_first + i) * args.lse.row);
    return lse == minus_infinity() ? 0.0f : exp2((x - lse) * kLog2E);
  }
};

}  // namespace tw::gpu

#define TW_FMHA_SCORES_KERNEL(NAME, ...)                                                                   \
  TW_KERNEL(tw::gpu::FmhaScores<__VA_ARGS__>::threads, tw::gpu::FmhaScores<__VA_ARGS__>::min_blocks, NAME, \
            tw_fmha_scores_args, tw::gpu::FmhaScores<__VA_ARGS__>::run(params);)

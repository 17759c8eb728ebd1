// Attention over a shared prefix and over what follows it become one: both results of a row are weighed by their sums.
//   TW_FMHA_MERGE_KERNEL(symbol, Config)   its only parameter is tw_fmha_merge_args; o and lse change in place. A
//                                          workgroup for eight rows of an item, of whatever heads
// Both are o = (P V) / l and lse = log(l) (natural); -inf: the row saw nothing there. Rows without a prefix, and those
// that are skipped or beyond a true length, stay as they are. Heads have any size; sixteen threads have a row.
#pragma once
#include "tilewright/core/args/fmha_merge.h"
#include "tilewright/gpu/fmha/params.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaMerge {
  using O = typename Config::O;
  static constexpr int threads = 128, min_blocks = 1, per_row = 16, rows = threads / per_row, columns = 8;
  static constexpr int shared_bytes = 0;

  TW_DEVICE static void run(const tw_fmha_merge_args& given) {
    const tw_fmha_args& args = given.args;
    fmha_wait_for_previous();
    if (block_index() == 0 && thread_index() == 0) fmha_join_status(given);
    const int all = (int)args.heads_q * (int)args.seq_q, blocks = ceil_div(all, rows);
    const int b = block_index() / blocks, id = block_index() % blocks * rows + thread_index() / per_row;
    const int h = id / (int)args.seq_q, i = id % (int)args.seq_q;
    const FmhaItem item = fmha_item<Config>(args, b);
    const int64_t of_all = Config::varlen ? item.q_first + i : (int64_t)b * args.seq_q + i;
    const bool there = id < all && i < (int)item.q_rows && !(Config::skip_min && item.skip);
    float* const lse = (float*)args.lse.ptr + (Config::varlen ? 0 : b) * args.lse.batch + h * args.lse.head +
                       (item.q_first + i) * args.lse.row;
    float own = 0.0f, other = minus_infinity();
    if (there && fmha_has_prefix(given, of_all)) {
      own = load_global<float>(lse);
      other = load_global<float>((const float*)given.prefix_lse.ptr + h * given.prefix_lse.head +
                                 of_all * given.prefix_lse.row);
    }
    barrier();  // all have read what one of them writes
    if (other != minus_infinity()) row(given, item, b, h, i, of_all, thread_index() % per_row, own, other, lse);
  }

  TW_DEVICE static void row(const tw_fmha_merge_args& given, const FmhaItem& item, int b, int h, int i, int64_t of_all,
                            int lane, float own, float other, float* lse) {
    const tw_fmha_args& args = given.args;
    const int64_t place = item.q_first + i, items = Config::varlen ? 0 : b;
    const float most = own > other ? own : other;
    const float mine = exp2((own - most) * kLog2E), its = exp2((other - most) * kLog2E), total = mine + its;
    char* const to = (char*)args.o.ptr + (items * args.o.batch + h * args.o.head + place * args.o.row) * size_of<O>;
    const char* const from =
        (const char*)given.prefix_o.ptr + (h * given.prefix_o.head + of_all * given.prefix_o.row) * size_of<O>;
    const int hdim = (int)args.hdim_v;
    TW_NO_UNROLL
    for (int c = lane * columns; c < hdim; c += per_row * columns) {
      float x[columns], y[columns];
      load_run(x, to + c * args.o.col * size_of<O>, hdim - c, args.o.col);
      load_run(y, from + c * size_of<O>, hdim - c, 1);
      TW_UNROLL
      for (int e = 0; e < columns; e++) x[e] = (x[e] * mine + y[e] * its) / total;
      fmha_store_run<O>(to + c * args.o.col * size_of<O>, x, hdim - c, args.o.col);
    }
    if (lane == 0) store_global(lse, most + log2(total) * kLn2);
  }

  // Neighbouring elements of a row, of which those below `count` exist, `step` elements apart.
  TW_DEVICE static void load_run(float (&x)[columns], const char* from, int count, int64_t step) {
    constexpr int vector = 16 / size_of<O>;
    if (count >= columns && step == 1 && ((uintptr_t)from & 15) == 0) {
      TW_UNROLL
      for (int first = 0; first < columns; first += vector) {
        const Packed<O, vector> run = {load_global<Words<4>>(from + first * size_of<O>)};
        TW_UNROLL
        for (int e = 0; e < vector; e++) x[first + e] = to_float<O>(run.get(e));
      }
      return;
    }
    TW_UNROLL
    for (int e = 0; e < columns; e++)
      x[e] = e < count ? to_float<O>(load_global<typename O::storage>(from + e * step * size_of<O>)) : 0.0f;
  }
};

}  // namespace tw::gpu

#define TW_FMHA_MERGE_KERNEL(NAME, ...)                                                                  \
  TW_KERNEL(tw::gpu::FmhaMerge<__VA_ARGS__>::threads, tw::gpu::FmhaMerge<__VA_ARGS__>::min_blocks, NAME, \
            tw_fmha_merge_args, tw::gpu::FmhaMerge<__VA_ARGS__>::run(params);)

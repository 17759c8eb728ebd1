// Preparation of the gradients: delta = rowsum(do * o) of every query, and zeros in dq_acc and dbias_acc.
//   TW_FMHA_DOT_DO_O_KERNEL(symbol, Config)   its only parameter is tw_fmha_args; a workgroup for 64 rows of a head
// A group of neighbouring lanes has a row.
#pragma once
#include "tilewright/gpu/fmha/params.hpp"

namespace tw::gpu {

// Where row i of a head is in delta, and in a slice of dq_acc.
template <class Config>
TW_DEVICE int64_t fmha_line_of(const tw_fmha_args& args, const FmhaItem& item, int64_t b, int64_t h, int64_t i) {
  return Config::varlen ? h * args.total_q + item.q_first + i : (b * args.heads_q + h) * args.seq_q + i;
}
template <class Config>
TW_DEVICE int64_t fmha_lines(const tw_fmha_args& args) {
  return Config::varlen ? args.total_q * args.heads_q : args.batch * args.heads_q * args.seq_q;
}

template <class Config>
struct FmhaDot {
  using O = typename Config::O;
  static constexpr int threads = 128, min_blocks = 1, rows = 64, shared_bytes = 0, lanes = 8;

  TW_DEVICE static float element(const char* from) {
    return to_float<O>(load_constant<typename O::storage>(from));
  }
  // A lane's part of a row: vectors of 16 bytes where both tensors have them, else elements.
  TW_DEVICE static float part(const char* x, const char* y, int64_t step_x, int64_t step_y, int count, int lane) {
    constexpr int kElements = 16 / size_of<O>;
    float sum = 0.0f;
    if (step_x == 1 && step_y == 1 && (((uintptr_t)x | (uintptr_t)y) & 15) == 0 && count % kElements == 0) {
      TW_UNROLL_BY(2)
      for (int c = lane * kElements; c < count; c += lanes * kElements) {
        const auto a = load_constant<Packed<O, kElements>>(x + c * size_of<O>);
        const auto b = load_constant<Packed<O, kElements>>(y + c * size_of<O>);
        TW_UNROLL
        for (int e = 0; e < kElements; e++) sum = fma(to_float<O>(a.get(e)), to_float<O>(b.get(e)), sum);
      }
      return sum;
    }
    TW_NO_UNROLL
    for (int c = lane; c < count; c += lanes)
      sum = fma(element(x + c * step_x * size_of<O>), element(y + c * step_y * size_of<O>), sum);
    return sum;
  }

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const int thread = thread_index(), blocks = max_of(ceil_div((int)args.seq_q, rows), 1), id = block_index();
    const int first = id % blocks * rows, h = id / blocks % (int)args.heads_q, b = id / blocks / (int)args.heads_q;
    const FmhaItem item = fmha_item<Config>(args, b);
    const int end = min_of(first + rows, (int)(Config::varlen ? item.q_rows : args.seq_q)), lane = thread % lanes;
    const int64_t items = Config::varlen ? 0 : b, slice = fmha_lines<Config>(args) * Config::hdim_q;
    TW_NO_UNROLL
    for (int r = 0; r < rows; r += threads / lanes) {  // all lanes of a wave take part in the sums
      const int i = first + r + thread / lanes;
      const int64_t line = fmha_line_of<Config>(args, item, b, h, i), place = item.q_first + i;
      float sum = 0.0f;
      if (i < min_of(end, (int)item.q_rows) && !(Config::skip_min && item.skip)) {
        const tw_fmha_tensor &o = args.o, &d = args.d_o;
        const char* const x = (const char*)o.ptr + (items * o.batch + h * o.head + place * o.row) * size_of<O>;
        const char* const y = (const char*)d.ptr + (items * d.batch + h * d.head + place * d.row) * size_of<O>;
        sum = part(x, y, o.col, d.col, (int)args.hdim_v, lane);
      }
      TW_UNROLL
      for (int mask = lanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
      if (i >= end) continue;
      if (lane == 0) store_global(args.delta + line, sum);
      for (int64_t s = 0; s < args.splits; s++)
        for (int c = lane * 4; c < Config::hdim_q; c += lanes * 4)
          store_global(args.dq_acc + s * slice + line * Config::hdim_q + c, Words<4>{});
    }
    if constexpr (Config::dbias) {
      const tw_fmha_tensor& to = args.dbias;
      const int64_t size = (to.batch ? args.batch : 1) * (to.head ? args.heads_q : 1) * (to.row ? args.seq_q : 1) *
                           (to.col ? args.seq_k : args.splits);
      for (int64_t at = (int64_t)id * threads + thread; at < size; at += (int64_t)block_count() * threads)
        store_global(args.dbias_acc + at, 0.0f);
    }
  }
};

}  // namespace tw::gpu

#define TW_FMHA_DOT_DO_O_KERNEL(NAME, ...)                                                           \
  TW_KERNEL(tw::gpu::FmhaDot<__VA_ARGS__>::threads, tw::gpu::FmhaDot<__VA_ARGS__>::min_blocks, NAME, \
            tw_fmha_args, tw::gpu::FmhaDot<__VA_ARGS__>::run(params);)

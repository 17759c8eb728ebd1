// Layout of shared memory of the kernel for latent caches with queries as rows, and its softmax. See
// sm90/latent/latent.hpp.
#pragma once
#include "tilewright/gpu/fmha/softmax.hpp"
#include "tilewright/sm90/fmha/decode_plan.hpp"

namespace tw::sm90 {

template <class C>
struct LatentRowsPlan {
  using Q = typename C::Q;
  using K = typename C::K;
  using X = Q;
  static constexpr int q = C::hdim_q, v = C::hdim_v, m0 = C::m0, n0 = C::n0;
  static constexpr int consumers = 2, threads = (consumers + 1) * kWarpgroup;
  static constexpr int registers_producer = 40, registers_consumer = 232;

  // A slot of the ring has a panel of 64 keys, 128 bytes of each, and two blocks of keys fill the ring. What is no
  // value comes first: it is needed for scores alone, so that its slot is free before all others.
  static constexpr int panel = 64, parts = q / panel, value_panels = v / panel, half_panels = value_panels / consumers;
  static constexpr int slot_bytes = n0 * 128, block_bytes = parts * slot_bytes, blocks = 2, stages = blocks * parts;
  static constexpr int first_value = parts - value_panels;  // part
  static constexpr int line(int) { return 128; }
  static constexpr bool shares = false;
  static constexpr int map_of(int) { return 1; }
  static constexpr int first_panel(int part) { return part < first_value ? part + value_panels : part - first_value; }
  static constexpr int panels_of(int) { return 1; }
  static constexpr int bytes_of(int) { return slot_bytes; }

  static_assert((is_same<X, fp16> || is_same<X, bf16>) && is_same<K, Q>, "16-bit elements");
  static_assert(m0 == 64 && n0 == 64, "rows of the instruction; a block of keys for each consumer");
  static_assert(q % panel == 0 && v % (panel * consumers) == 0 && v / consumers <= 256 && v < q, "panels");

  // Behind the ring: queries, probabilities of one block, maxima of both consumers' rows; maxima and sums of the
  // results' rows, sums of the second consumer; barriers. (tilewright_fmha/config/latent.py has the same sums.)
  static constexpr int q_bytes = m0 * q * 2, p_bytes = m0 * 128, row_bytes = 24;
  static constexpr int barrier_bytes = 640;
  static constexpr int q_at = blocks * block_bytes, p_at = q_at + q_bytes, maxima_at = p_at + p_bytes;
  static constexpr int sums_at = maxima_at + consumers * m0 * 4, other_sums_at = sums_at + m0 * 8;
  static constexpr int words_at = other_sums_at + m0 * 4;  // of tickets
  static constexpr int barriers_at = maxima_at + m0 * row_bytes, shared_bytes = barriers_at + barrier_bytes;
  static_assert(words_at + consumers * 4 <= barriers_at && barriers_at % 16 == 0 && shared_bytes <= 232448, "fits");
};

// Online softmax of scores whose rows are queries: a thread has parts of two rows, of which four lanes share each.
template <class C>
struct LatentRows {
  static constexpr int n0 = C::n0, count = n0 / 2;
  static constexpr bool masked = C::mask != FmhaMask::no, windowed = C::mask == FmhaMask::window;

  const tw_fmha_args& args;
  float factor;      // scores times it are logarithms to base 2
  float m[2], l[2];  // the largest score so far; the sum of this thread's exponentials
  int keys, last[masked ? 2 : 1], first[windowed ? 2 : 1], sinks;  // what a row sees
  int whole_first, whole_last;                                     // keys that all rows see

  static TW_SM90 int lane() { return threadIdx.x % kWarp; }
  static TW_SM90 int warp() { return threadIdx.x % kWarpgroup / kWarp; }
  static TW_SM90 int bound(int64_t x) { return (int)fmha_min(x, 1 << 29); }
  // The row of queries of this thread's row `h`.
  static TW_SM90 int row_of(int h) { return warp() * 16 + lane() / 4 + h * 8; }

  TW_SM90 LatentRows(const tw_fmha_args& args, const FmhaPiece& piece, int group) : args(args) {
    const int g = C::pack_gqa ? group : 1;
    factor = (float)args.scale * (C::softcap ? 1.0f / (float)args.softcap : gpu::kLog2E);
    keys = piece.k_rows, whole_first = 0, whole_last = keys, sinks = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      m[h] = gpu::minus_infinity(), l[h] = 0.0f;
      const int query = (piece.first + row_of(h)) / g;
      if constexpr (masked) last[h] = args.right >= 0 ? min(keys, query + piece.off + bound(args.right) + 1) : keys;
      if constexpr (windowed) first[h] = args.left >= 0 ? query + piece.off - bound(args.left) : 0;
    }
    if constexpr (masked)
      if (args.right >= 0) whole_last = min(keys, piece.first / g + piece.off + bound(args.right) + 1);
    if constexpr (windowed)
      if (args.left >= 0) whole_first = (piece.first + C::m0 - 1) / g + piece.off - bound(args.left);
    if constexpr (C::token_sinks) sinks = bound(args.sink_size);
  }

  static TW_SM90 int column_of(int i) { return i / 4 * 8 + lane() % 4 * 2 + i % 2; }

  TW_SM90 void hide(float (&s)[count], int c0) const {
#pragma unroll
    for (int i = 0; i < count; i++) {
      const int j = c0 + column_of(i), h = i / 2 % 2;
      bool seen = j < (masked ? last[masked ? h : 0] : keys);
      if constexpr (windowed) seen = seen && (j >= first[h] || (C::token_sinks && j < sinks));
      if (!seen) s[i] = gpu::minus_infinity();
    }
  }
  static TW_SM90 void hide_pages(float (&s)[count], uint32_t absent, int rows) {
    const int shift = 31 - __clz(rows);
#pragma unroll
    for (int i = 0; i < count; i++)
      if (absent >> (column_of(i) >> shift) & 1) s[i] = gpu::minus_infinity();
  }

  // Takes maxima over from the other consumer, or raises them. Returns what sums so far are to be multiplied by.
  TW_SM90 void raise(const float (&most)[2], float (&rescale)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      rescale[h] = gpu::exp2(m[h] - safe(most[h]));
      m[h] = most[h], l[h] *= rescale[h];
    }
  }
  static TW_SM90 float safe(float x) { return x == gpu::minus_infinity() ? 0.0f : x; }

  // Makes P of S, the block from key c0 on.
  TW_SM90 void run(float (&s)[count], int c0, uint32_t absent, float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < count; i++) {
      s[i] *= factor;
      if constexpr (C::softcap) s[i] = gpu::fmha_tanh(s[i]) * ((float)args.softcap * gpu::kLog2E);
    }
    if (c0 < whole_first || c0 + n0 > whole_last) hide(s, c0);
    if constexpr (C::paged)
      if (absent) hide_pages(s, absent, min((int)args.page_size, n0));
    float most[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      most[h] = m[h];
#pragma unroll
      for (int i = 0; i < count; i += 4) most[h] = fmaxf(most[h], fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) most[h] = fmaxf(most[h], __shfl_xor_sync(0xffffffffu, most[h], mask));
    }
    raise(most, rescale);
    const float from[2] = {safe(m[0]), safe(m[1])};
#pragma unroll
    for (int i = 0; i < count; i++) {
      s[i] = gpu::exp2(s[i] - from[i / 2 % 2]);
      l[i / 2 % 2] += s[i];
    }
  }

  // The sum of a whole row.
  TW_SM90 float sum_of(int h) const {
    float x = l[h];
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
  }
};

}  // namespace tw::sm90

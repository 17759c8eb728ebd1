// Online softmax of scores that stand transposed: a row of what wgmma left is a key, a column a query, of which a
// thread has every fourth pair; the keys of a column are those of eight lanes and four warps. See sm90/fmha/decode.hpp.
#pragma once
#include "tilewright/gpu/fmha/softmax.hpp"
#include "tilewright/sm90/fmha/decode_plan.hpp"

namespace tw::sm90 {

// P: the kernel's plan, which says how many columns a consumer has (P::m0), and how many consumers there are.
template <class C, class P = FmhaDecodePlan<C>>
struct FmhaColumns {
  using Plan = P;
  static constexpr int m0 = Plan::m0, n0 = C::n0, tiles = Plan::tiles, pairs = m0 / 8, columns = m0 / 4;
  static constexpr bool masked = C::mask != FmhaMask::no, windowed = C::mask == FmhaMask::window;
  static constexpr bool scaled = C::qscale != FmhaScale::no;
  static_assert(C::qscale == FmhaScale::no || C::qscale == FmhaScale::pertensor, "one factor for all keys of a head");

  const tw_fmha_args& args;
  float factor[scaled ? columns : 1];  // scores times it are logarithms to base 2
  float m[columns], l[columns];        // the largest score so far; the sum of this thread's exponentials
  int keys, last[masked ? columns : 1], first[windowed ? columns : 1], sinks;  // what a column sees
  int whole_first, whole_last;         // keys that all columns see

  static constexpr int kBarrier = 1;  // of the first consumer
  static TW_SM90 int consumer() { return Plan::consumers == 1 ? 0 : (int)threadIdx.x / kWarpgroup; }
  static TW_SM90 int thread() { return Plan::consumers == 1 ? (int)threadIdx.x : (int)threadIdx.x % kWarpgroup; }
  static TW_SM90 void meet() { join_barrier(kBarrier + consumer(), kWarpgroup); }
  static TW_SM90 int lane() { return threadIdx.x % kWarp; }
  static TW_SM90 int warp() { return thread() / kWarp; }
  static TW_SM90 int bound(int64_t x) { return (int)fmha_min(x, 1 << 29); }
  // The row of queries of this thread's column `i`.
  static TW_SM90 int row_of(int i) { return i / 2 * 8 + lane() % 4 * 2 + i % 2; }

  TW_SM90 FmhaColumns(const tw_fmha_args& args, const FmhaPiece& piece, int group) : args(args) {
    const int g = C::pack_gqa ? group : 1;
    float all = (float)args.scale * (C::softcap ? 1.0f / (float)args.softcap : gpu::kLog2E);
    const int key_head = C::pack_gqa ? piece.head : piece.head / group;
    if constexpr (scaled) all *= gpu::fmha_scale_at(args.k_scale, piece.b, key_head, 0);
    factor[0] = all;
    keys = piece.k_rows, whole_first = 0, whole_last = keys, sinks = 0;
#pragma unroll
    for (int i = 0; i < columns; i++) {
      m[i] = gpu::minus_infinity(), l[i] = 0.0f;
      const int p = piece.first + row_of(i), query = p / g;
      if constexpr (scaled) {
        factor[i] = all;
        if (query < piece.q_rows)
          factor[i] *= gpu::fmha_scale_at(args.q_scale, piece.b, piece.head * g + (p - query * g), query);
      }
      if constexpr (masked) last[i] = args.right >= 0 ? min(keys, query + piece.off + bound(args.right) + 1) : keys;
      if constexpr (windowed) first[i] = args.left >= 0 ? query + piece.off - bound(args.left) : 0;
    }
    if constexpr (masked)
      if (args.right >= 0) whole_last = min(keys, piece.first / g + piece.off + bound(args.right) + 1);
    if constexpr (windowed)
      if (args.left >= 0) whole_first = (piece.first + m0 - 1) / g + piece.off - bound(args.left);
    if constexpr (C::token_sinks) sinks = bound(args.sink_size);
  }

  // The factor of results besides 1 / l.
  static TW_SM90 float result_factor(const tw_fmha_args& args, int b, int key_head) {
    return scaled ? gpu::fmha_scale_at(args.v_scale, b, key_head, 0) : 1.0f;
  }

  // Over the lanes of a column.
  template <class F>
  static TW_SM90 float over_lanes(float x, F f) {
#pragma unroll
    for (int mask = 4; mask < kWarp; mask *= 2) x = f(x, __shfl_xor_sync(0xffffffffu, x, mask));
    return x;
  }
  // Over the warps: `at` has m0 words for each, and is not written again before all have met once more.
  template <class F>
  static TW_SM90 void over_warps(float (&x)[columns], uint32_t at, F f) {
    if (lane() < 4)
#pragma unroll
      for (int j = 0; j < pairs; j++)
        gpu::store_shared(at + (warp() * m0 + row_of(2 * j)) * 4,
                          gpu::Words<2>{gpu::bits_of(x[2 * j]), gpu::bits_of(x[2 * j + 1])});
    meet();
#pragma unroll
    for (int j = 0; j < pairs; j++) {
      gpu::Words<2> w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = gpu::load_shared<2>(at + (i * m0 + row_of(2 * j)) * 4);
#pragma unroll
      for (int e = 0; e < 2; e++)
        x[2 * j + e] = f(f(gpu::float_of(w[0].w[e]), gpu::float_of(w[1].w[e])),
                         f(gpu::float_of(w[2].w[e]), gpu::float_of(w[3].w[e])));
    }
  }
  static TW_SM90 float larger(float x, float y) { return fmaxf(x, y); }
  static TW_SM90 float sum(float x, float y) { return x + y; }

  TW_SM90 void hide(float (&s)[tiles][m0 / 2], int key) const {
#pragma unroll
    for (int t = 0; t < tiles; t++)
#pragma unroll
      for (int i = 0; i < m0 / 2; i++) {
        const int j = key + t * 64 + i / 2 % 2 * 8, c = i / 4 * 2 + i % 2;
        bool seen = j < (masked ? last[masked ? c : 0] : keys);
        if constexpr (windowed) seen = seen && (j >= first[c] || (C::token_sinks && j < sinks));
        if (!seen) s[t][i] = gpu::minus_infinity();
      }
  }
  static TW_SM90 void hide_pages(float (&s)[tiles][m0 / 2], uint32_t absent, int key, int rows) {
    const int shift = 31 - __clz(rows);
#pragma unroll
    for (int t = 0; t < tiles; t++)
#pragma unroll
      for (int i = 0; i < m0 / 2; i++)
        if (absent >> ((key + t * 64 + i / 2 % 2 * 8) >> shift) & 1) s[t][i] = gpu::minus_infinity();
  }

  // Makes P of S, the block from key c0 on. at: for maxima of the warps. rescale: what sums of earlier blocks are to be
  // multiplied by.
  TW_SM90 void run(float (&s)[tiles][m0 / 2], int c0, uint32_t absent, uint32_t at, float (&rescale)[columns]) {
    const int own = warp() * 16 + lane() / 4;  // the thread's first key in the block
    float most[columns];
#pragma unroll
    for (int t = 0; t < tiles; t++)
#pragma unroll
      for (int i = 0; i < m0 / 2; i++) {
        float& x = s[t][i];
        x *= factor[scaled ? i / 4 * 2 + i % 2 : 0];
        if constexpr (C::softcap) x = gpu::fmha_tanh(x) * ((float)args.softcap * gpu::kLog2E);
      }
    if (c0 < whole_first || c0 + n0 > whole_last) hide(s, c0 + own);
    if constexpr (C::paged)
      if (absent) hide_pages(s, absent, own, min((int)args.page_size, n0));
#pragma unroll
    for (int c = 0; c < columns; c++) {
      most[c] = gpu::minus_infinity();
#pragma unroll
      for (int t = 0; t < tiles; t++)
        most[c] = fmaxf(most[c], fmaxf(s[t][c / 2 * 4 + c % 2], s[t][c / 2 * 4 + 2 + c % 2]));
      most[c] = over_lanes(most[c], larger);
    }
    over_warps(most, at, larger);
    float safe[columns];
#pragma unroll
    for (int c = 0; c < columns; c++) {
      most[c] = fmaxf(most[c], m[c]);
      safe[c] = most[c] == gpu::minus_infinity() ? 0.0f : most[c];
      rescale[c] = gpu::exp2(m[c] - safe[c]);
      m[c] = most[c], l[c] *= rescale[c];
    }
#pragma unroll
    for (int t = 0; t < tiles; t++)
#pragma unroll
      for (int i = 0; i < m0 / 2; i++) {
        const int c = i / 4 * 2 + i % 2;
        s[t][i] = gpu::exp2(s[t][i] - safe[c]);
        l[c] += s[t][i];
      }
  }

  // After the last block: the sums of whole columns.
  TW_SM90 void finish(uint32_t at) {
#pragma unroll
    for (int c = 0; c < columns; c++) l[c] = over_lanes(l[c], sum);
    over_warps(l, at, sum);
  }
};

}  // namespace tw::sm90

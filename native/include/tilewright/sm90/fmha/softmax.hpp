// Online softmax of 64 rows of scores where wgmma leaves them: a thread has two rows, 8 apart, of which it holds every
// fourth pair of columns. See sm90/fmha/forward.hpp.
#pragma once
#include "tilewright/sm90/fmha/plan.hpp"

namespace tw::sm90 {

using gpu::exp2;
using gpu::kLn2;
using gpu::kLog2E;
using gpu::log2;
using gpu::minus_infinity;
using gpu::reciprocal;

// 2^x - 1 over 2^x + 1 of x = 2 y log2(e): to 2^-22 of 1.
TW_SM90 float fmha_tanh(float y) { return 1.0f - 2.0f * reciprocal(exp2(y * (2.0f * kLog2E)) + 1.0f); }

template <class C>
struct FmhaRows {
  static constexpr int n0 = C::n0, scores = n0 / 2;

  // Scores times `factor` are logarithms to base 2. With a soft cap they are made so first.
  const float factor, inner, cap;
  const tw_fmha_args& args;
  float m[2], l[2];             // the largest score so far, and the sum of exponentials in this thread's columns
  int keys, seen, from;         // columns that exist; behind the last one that the thread's first row sees, and the first
  int whole_first, whole_last;  // columns that all of the consumer's 64 rows see

  // Bounds of masks without a sum that overflows: sizes are below this (a rule).
  static constexpr int kAll = 1 << 30;
  static TW_SM90 int bound(int64_t x) { return (int)fmha_min(x, 1 << 29); }

  // row: the thread's first row in its item, top: the consumer's.
  TW_SM90 FmhaRows(const tw_fmha_args& args, const FmhaSpan& span, int top, int row)
      : factor(C::softcap ? 1.0f : (float)args.scale * kLog2E),
        inner(C::softcap ? (float)args.scale / (float)args.softcap : 1.0f), cap((float)args.softcap * kLog2E), args(args) {
    m[0] = m[1] = minus_infinity(), l[0] = l[1] = 0.0f;
    keys = span.k_rows, seen = kAll, from = -kAll;
    whole_first = 0, whole_last = keys;
    if constexpr (C::mask != FmhaMask::no)
      if (args.right >= 0) {
        const int right = span.off + bound(args.right) + 1;
        seen = row + right, whole_last = min(keys, top + right);
      }
    if constexpr (C::mask == FmhaMask::window)
      if (args.left >= 0) {
        const int left = span.off - bound(args.left);
        from = row + left, whole_first = top + 63 + left;
      }
  }

  // A row sees those of the block's columns, counted from the thread's first one, in [first, last) and below `sinks`.
  TW_SM90 void hide(float (&s)[scores], int c0) const {
    const int column = c0 + (threadIdx.x & 3) * 2;
    int sinks = 0;
    if constexpr (C::token_sinks) sinks = bound(args.sink_size) - column;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int last = keys - column, first = 0;
      if constexpr (C::mask != FmhaMask::no) last = min(last, seen + h * 8 - column);
      if constexpr (C::mask == FmhaMask::window) first = from + h * 8 - column;
#pragma unroll
      for (int i = 2 * h; i < scores; i += i % 2 ? 3 : 1) {
        const int j = i / 4 * 8 + i % 2;
        bool seen = j < last;
        if constexpr (C::mask == FmhaMask::window) seen = seen && (j >= first || (C::token_sinks && j < sinks));
        if (!seen) s[i] = minus_infinity();
      }
    }
  }

  // Columns of pages that are not there; `rows` of them in a page, or in a block if that is less.
  static TW_SM90 void hide_pages(float (&s)[scores], uint32_t absent, int rows) {
    const int shift = 31 - __clz(rows), column = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int i = 0; i < scores; i++)
      if (absent >> ((i / 4 * 8 + i % 2 + column) >> shift) & 1) s[i] = minus_infinity();
  }

  // Makes P of S, the block from column c0 on. rescale: what the sums of earlier blocks are to be multiplied by.
  TW_SM90 void run(float (&s)[scores], int c0, float (&rescale)[2], uint32_t absent) {
    if constexpr (C::softcap) {
#pragma unroll
      for (int i = 0; i < scores; i++) s[i] = fmha_tanh(s[i] * inner) * cap;
    }
    if (c0 < whole_first || c0 + n0 > whole_last) hide(s, c0);
    if constexpr (C::paged)
      if (absent) hide_pages(s, absent, min((int)args.page_size, n0));
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float most = m[h];
#pragma unroll
      for (int i = 0; i < scores; i += 4) most = fmaxf(most, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float safe = most == minus_infinity() ? 0.0f : most * factor;
      rescale[h] = exp2(m[h] * factor - safe);
      m[h] = most;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < scores; i += 4) {
        float &x = s[i + 2 * h], &y = s[i + 2 * h + 1];
        x = exp2(x * factor - safe), y = exp2(y * factor - safe);
        sum += x + y;
      }
      l[h] = l[h] * rescale[h] + sum;
    }
  }

  // After the last block: what the rows of O are multiplied by, and the logarithms of the whole sums.
  TW_SM90 void finish(int head, float (&scale)[2], float (&lse)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
      l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
      float most = m[h] * factor, own = 1.0f;
      if constexpr (C::learned_sinks) {
        const float sink = gpu::load_constant<float>(args.sinks + head) * kLog2E, all = fmaxf(most, sink);
        if (all != minus_infinity()) {
          own = exp2(most - all), l[h] = l[h] * own + exp2(sink - all);
          most = all;
        }
      }
      scale[h] = l[h] == 0.0f ? 0.0f : own / l[h];
      lse[h] = l[h] == 0.0f ? minus_infinity() : (most + log2(l[h])) * kLn2;
    }
  }
};

}  // namespace tw::sm90

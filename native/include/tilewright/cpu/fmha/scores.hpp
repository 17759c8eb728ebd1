// Scores or probabilities in memory, of which attention itself keeps blocks only: for who asks to see them.
//   TW_FMHA_SCORES(name, Config)   name: tw_cpu_kernel with tw_fmha_scores_args as args
// A few queries at a time: each key becomes fp32 once, for all of them. Heads have any size up to kMost.
#pragma once
#include "tilewright/core/args/fmha_scores.h"
#include "tilewright/core/math.hpp"
#include "tilewright/cpu/fmha/status.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct FmhaScores {
  using Q = typename Config::Q;
  using K = typename Config::K;
  using Bias = typename Config::Bias;
  static constexpr int kRows = 8, kColumns = 64, kMost = 1024;

  const tw_fmha_args& args;
  const tw_fmha_tensor& to;
  const int64_t what;

  static void run(const tw_fmha_scores_args& given, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);  // needs no scratch memory: any team
    const FmhaScores self{given.args, given.to, given.what};
    const tw_fmha_args& args = given.args;
    const int64_t items = self.as_bias() && !given.to.batch ? min_of(args.batch, 1) : args.batch;
    const int64_t blocks = ceil_div(args.seq_q, kRows), pieces = items * args.heads_q * blocks;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t head = piece / blocks;
      self.rows(head / args.heads_q, head % args.heads_q, piece % blocks * kRows);
    }
    crew.end_stage(pieces);
  }

  TW_INLINE bool as_bias() const { return what >= kFmhaAdded; }

  TW_NOINLINE void rows(int64_t b, int64_t h, int64_t first) const {
    const FmhaItem item = fmha_item<Config>(args, b);
    const int64_t end = min_of(first + kRows, Config::varlen && !as_bias() ? item.q_rows : args.seq_q);
    const int64_t count = end - first, hk = h / (args.heads_q / args.heads_k);
    if (count <= 0) return;
    alignas(64) float queries[kRows][kMost];
    const int64_t live = max_of(min_of(count, item.q_rows - first), 0);
    for (int64_t r = 0; r < live && what != kFmhaAdded; r++)
      widen<Q>((const char*)args.q.ptr + ((Config::varlen ? 0 : b) * args.q.batch + h * args.q.head +
                                          (item.q_first + first + r) * args.q.row) * size_of<Q>,
               args.q.col, queries[r]);
    const char* const keys =
        (const char*)args.k.ptr +
        ((Config::varlen ? 0 : item.cache) * args.k.batch + hk * args.k.head + item.k_first * args.k.row) * size_of<K>;
    alignas(64) float s[kRows][kColumns], key[kMost];
    for (int64_t c0 = 0; c0 < args.seq_k; c0 += kColumns) {
      const int64_t columns = min_of(args.seq_k - c0, kColumns);
      __builtin_memset(s, 0, sizeof s);
      for (int64_t j = 0; what != kFmhaAdded && live > 0 && j < min_of(columns, item.k_rows - c0); j++) {
        widen<K>(keys + (c0 + j) * args.k.row * size_of<K>, args.k.col, key);
        for (int64_t r = 0; r < live; r++) s[r][j] = dot(queries[r], key);
      }
      for (int64_t r = 0; r < count; r++) {
        finish(item, b, h, first + r, c0, columns, s[r]);
        float* const line = (float*)to.ptr + (Config::varlen && !as_bias() ? 0 : b) * to.batch + h * to.head +
                            ((as_bias() ? 0 : item.q_first) + first + r) * to.row;
        for (int64_t j = 0; j < columns; j++) line[(c0 + j) * to.col] = s[r][j];
      }
    }
  }

  // A row's elements as fp32, zeros up to a whole vector.
  template <class E>
  TW_INLINE void widen(const char* from, int64_t col, float* line) const {
    const int64_t hdim = args.hdim_q;
    if (col == 1) {
      for (int64_t c = 0; c < hdim; c += kLanes)
        store_as(line + c, load_f32_partial<E>(from + c * size_of<E>, min_of(hdim - c, kLanes)));
      return;
    }
    for (int64_t c = 0; c < round_up(hdim, kLanes); c++)
      line[c] = c < hdim ? to_float<E>(from + c * col * size_of<E>) : 0.0f;
  }
  TW_INLINE float dot(const float* x, const float* y) const {
    f32v sum = {};
    for (int64_t c = 0; c < args.hdim_q; c += kLanes) sum += load_as<f32v>(x + c) * load_as<f32v>(y + c);
    return sum_lanes(sum);
  }

  // From products of row i with columns from c0 on to what is asked for.
  TW_NOINLINE void finish(const FmhaItem& item, int64_t b, int64_t h, int64_t i, int64_t c0, int64_t columns,
                          float* s) const {
    const float scale = (float)args.scale, cap = (float)args.softcap;
    const int64_t live = i < item.q_rows ? max_of(min_of(columns, item.k_rows - c0), 0) : 0;
    if (what != kFmhaAdded)
      for (int64_t j = 0; j < kColumns; j += kLanes) {
        f32v x = load_as<f32v>(s + j) * scale;
        if (what != kFmhaScaled && args.softcap > 0) x = tanh(x * (1.0f / cap)) * cap;
        store_as(s + j, x);
      }
    if (what != kFmhaScaled && what != kFmhaCapped) add(item, b, h, i, c0, columns, s);
    if (what == kFmhaAdded) return;
    if (what == kFmhaMasked || what == kFmhaProbabilities) {
      const float lse = what == kFmhaMasked || live == 0 ? 0.0f : lse_of(item, b, h, i);
      for (int64_t j = 0; j < live; j++)
        if (!fmha_visible(args, item, i, c0 + j) || lse == -__builtin_inff()) s[j] = -__builtin_inff();
      if (what == kFmhaProbabilities)
        for (int64_t j = 0; j < kColumns; j += kLanes)
          store_as(s + j, exp2((load_as<f32v>(s + j) - (lse == -__builtin_inff() ? 0.0f : lse)) * kLog2E));
    }
    for (int64_t j = live; j < columns; j++) s[j] = what == kFmhaMasked ? -__builtin_inff() : 0.0f;
  }

  TW_INLINE void add(const FmhaItem& item, int64_t b, int64_t h, int64_t i, int64_t c0, int64_t columns,
                     float* s) const {
    const tw_fmha_tensor& x = args.bias;
    if (x.ptr) {
      const char* const row = (const char*)x.ptr + (b * x.batch + h * x.head + i * x.row) * size_of<Bias>;
      for (int64_t j = 0; j < columns; j++) s[j] += to_float<Bias>(row + (c0 + j) * x.col * size_of<Bias>);
    }
    if (args.slopes) {
      const float slope = args.slopes[b * args.slope_batch + h];
      for (int64_t j = 0; j < columns; j++) {
        const int64_t distance = i + item.off - c0 - j;
        s[j] -= slope * (float)(distance < 0 ? -distance : distance);
      }
    }
  }

  TW_INLINE float lse_of(const FmhaItem& item, int64_t b, int64_t h, int64_t i) const {
    return ((const float*)args.lse.ptr)[(Config::varlen ? 0 : b) * args.lse.batch + h * args.lse.head +
                                        (item.q_first + i) * args.lse.row];
  }
};

TW_NAMESPACE_END

#define TW_FMHA_SCORES(NAME, CONFIG)                                       \
  TW_EXPORT void NAME(const void* args, tw_team* team) {                   \
    tw::FmhaScores<CONFIG>::run(*(const tw_fmha_scores_args*)args, team);  \
  }

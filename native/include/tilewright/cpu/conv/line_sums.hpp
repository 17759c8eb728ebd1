// Sums of products of two lines of pixels that were widened to fp32 (cpu/conv/direct/weight.hpp): those of a few taps
// and channels stay in registers.
#pragma once
#include "tilewright/core/types.hpp"

TW_NAMESPACE_BEGIN

struct LineSums {
  static constexpr int64_t L = kLanes;

  // Adds a line's products with kTaps taps along W (tap_step vectors apart) and kNarrow narrow channels to `sums`.
  template <int kTaps, int kNarrow, bool kXIsWide>
  static TW_NOINLINE void add(const float* x, int64_t x_step, int64_t tap_step, const float* dy, int64_t dy_step,
                              int64_t count, float* sums, int64_t sums_step) {
    constexpr int kChains = kTaps * kNarrow >= 8 ? 1 : kTaps * kNarrow >= 4 ? 2 : 4;
    f32v sum[kChains][kTaps][kNarrow];
    TW_UNROLL
    for (int u = 0; u < kChains; u++)
      TW_UNROLL
      for (int t = 0; t < kTaps; t++)
        TW_UNROLL
        for (int c = 0; c < kNarrow; c++) sum[u][t][c] = f32v{};
    int64_t i = 0;
    for (; i + kChains <= count; i += kChains) {
      TW_UNROLL
      for (int u = 0; u < kChains; u++)
        step<kTaps, kNarrow, kXIsWide>(x + (i + u) * x_step, tap_step, dy + (i + u) * dy_step, sum[u]);
    }
    for (; i < count; i++) step<kTaps, kNarrow, kXIsWide>(x + i * x_step, tap_step, dy + i * dy_step, sum[0]);
    TW_UNROLL
    for (int t = 0; t < kTaps; t++)
      TW_UNROLL
      for (int c = 0; c < kNarrow; c++) {
        f32v all = sum[0][t][c];
        TW_UNROLL
        for (int u = 1; u < kChains; u++) all += sum[u][t][c];
        float* const to = sums + t * sums_step + c * L;
        store_as(to, load_as<f32v>(to) + all);
      }
  }
  template <int kTaps, int kNarrow, bool kXIsWide>
  static TW_INLINE void step(const float* x, int64_t tap_step, const float* dy, f32v (*sum)[kNarrow]) {
    TW_UNROLL
    for (int t = 0; t < kTaps; t++)
      TW_UNROLL
      for (int c = 0; c < kNarrow; c++)
        sum[t][c] +=
            load_as<f32v>(x + t * tap_step + (kXIsWide ? 0 : c * L)) * load_as<f32v>(dy + (kXIsWide ? c * L : 0));
  }

  // Three lines of x at once, with three taps each that lie `offsets` away: nine sums stay in registers. Elements of dy
  // are of type E, and dy_step bytes apart.
  template <class E>
  static TW_NOINLINE void add_square(const float* const* x, int64_t x_step, const int64_t* offsets, const char* dy,
                                     int64_t dy_step, int64_t count, float* sums) {
    f32v sum[9];
    const float* from[9];
    TW_UNROLL
    for (int t = 0; t < 9; t++) sum[t] = f32v{}, from[t] = x[t / 3] + offsets[t % 3];
    for (int64_t i = 0; i < count; i++) {
      const f32v y = load_f32<E>(dy + i * dy_step);
      TW_UNROLL
      for (int t = 0; t < 9; t++) sum[t] += load_as<f32v>(from[t] + i * x_step) * y;
    }
    TW_UNROLL
    for (int t = 0; t < 9; t++) store_as(sums + t * L, load_as<f32v>(sums + t * L) + sum[t]);
  }
};

TW_NAMESPACE_END

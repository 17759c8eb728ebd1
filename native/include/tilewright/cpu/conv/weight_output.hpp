// Where the gradient of the weights goes: accumulators of a product whose rows are output channels and whose columns
// are taps with input channels, to dw wherever it lies.
#pragma once
#include "tilewright/core/args/conv.h"
#include "tilewright/core/types.hpp"

TW_NAMESPACE_BEGIN

// dw = alpha * sum [+ acc] for one group.
template <class Config>
struct WeightOutput {
  using C = typename Config::C;

  const tw_conv_problem& problem;
  char* to;
  const char* earlier;  // accumulate: laid out as `to`

  TW_INLINE WeightOutput(const tw_conv_problem& of, int64_t group) : problem(of) {
    const int64_t offset = group * of.weight_g * size_of<C>;
    to = (char*)of.gemm.c + offset;
    earlier = Config::accumulate ? (const char*)of.acc + offset : nullptr;
  }

  TW_INLINE int64_t tap_offset(int64_t tap) const {
    const tw_conv_axis* const axes = problem.axes;
    const int64_t w = tap % axes[2].taps, rest = tap / axes[2].taps;
    return rest / axes[1].taps * axes[0].tap_stride + rest % axes[1].taps * axes[1].tap_stride + w * axes[2].tap_stride;
  }

  // Columns [column, column + count) of one row; whole vectors of `sums` are readable.
  TW_NOINLINE void store(int64_t row, int64_t column, int64_t count, const float* sums) const {
    const float alpha = (float)problem.gemm.alpha;
    for (int64_t tap = column / problem.channels, channel = column % problem.channels; count > 0; tap++, channel = 0) {
      const int64_t length = min_of(problem.channels - channel, count);
      const int64_t at = row * problem.weight_n + tap_offset(tap) + channel * problem.weight_c;
      if (problem.weight_c == 1 || length == 1) {
        for (int64_t i = 0; i < length; i += kLanes) {
          f32v x = load_lanes(sums + i, length - i) * alpha;
          if constexpr (Config::accumulate) x += load_f32_partial<C>(earlier + (at + i) * size_of<C>, length - i);
          store_f32_partial<C>(to + (at + i) * size_of<C>, x, length - i);
        }
      } else {
        for (int64_t i = 0; i < length; i++) store_one(at + i * problem.weight_c, sums[i], alpha);
      }
      sums += length, count -= length;
    }
  }

  // One element, by its distance from the group's first.
  TW_INLINE void store_one(int64_t element, float sum, float alpha) const {
    float x = sum * alpha;
    if constexpr (Config::accumulate) x += to_float<C>(earlier + element * size_of<C>);
    if constexpr (is_same<C, fp32>) store_as(to + element * size_of<C>, x);
    else store_f32_partial<C>(to + element * size_of<C>, splat(x), 1);
  }

 private:
  static TW_INLINE f32v load_lanes(const float* from, int64_t count) {
    f32v x = {};
    if (count >= kLanes) return load_as<f32v>(from);
    __builtin_memcpy(&x, from, (size_t)count * 4);
    return x;
  }
};

TW_NAMESPACE_END

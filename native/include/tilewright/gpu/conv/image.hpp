// Pixels and taps of a convolution: numbers to places and back, and where the rows of a result lie.
//
// Offsets within one tensor are 32-bit numbers of elements, and may wrap on the way: a row of which only some taps meet
// the image can begin ahead of it.
#pragma once
#include "tilewright/core/args/conv.h"
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

// n / d for 0 <= n < 2^31.
TW_DEVICE int divide(int n, const tw_divisor& by) {
  return (int)((uint64_t)(uint32_t)n * (uint32_t)by.multiplier >> (uint32_t)by.shift);
}

// A number as (n, d, h, w); of kNdim axes only the last ones exist.
struct Spot {
  int n, d, h, w;
  TW_DEVICE int axis(int i) const { return i == 0 ? d : i == 1 ? h : w; }
};
template <int kNdim>
TW_DEVICE Spot spot_of_row(const tw_conv_axis* axes, int row) {
  Spot s = {0, 0, 0, 0};
  int rest = divide(row, axes[2].by_rows);
  s.w = row - rest * (int)axes[2].rows;
  if constexpr (kNdim > 1) {
    const int next = divide(rest, axes[1].by_rows);
    s.h = rest - next * (int)axes[1].rows;
    rest = next;
  }
  if constexpr (kNdim > 2) {
    const int next = divide(rest, axes[0].by_rows);
    s.d = rest - next * (int)axes[0].rows;
    rest = next;
  }
  s.n = rest;
  return s;
}
template <int kNdim>
TW_DEVICE Spot spot_of_tap(const tw_conv_axis* axes, int tap) {
  Spot s = {0, 0, 0, tap};
  if constexpr (kNdim > 1) {
    s.h = divide(tap, axes[2].by_taps);
    s.w = tap - s.h * (int)axes[2].taps;
  }
  if constexpr (kNdim > 2) {
    const int rest = s.h;
    s.d = divide(rest, axes[1].by_taps);
    s.h = rest - s.d * (int)axes[1].taps;
  }
  return s;
}

// ---- the gathered image ----

// Where the pixel of a row and its first tap lies.
struct Pixel {
  int at[3];        // coordinates; may be outside
  uint32_t offset;  // elements
};
template <int kNdim>
TW_DEVICE Pixel pixel_of(const tw_conv_problem& p, int row) {
  const Spot s = spot_of_row<kNdim>(p.axes, row);
  Pixel x = {{0, 0, 0}, (uint32_t)s.n * (uint32_t)p.image_n};
  TW_UNROLL
  for (int i = 3 - kNdim; i < 3; i++) {
    x.at[i] = (int)p.axes[i].origin + s.axis(i) * (int)p.axes[i].row_step;
    x.offset += (uint32_t)x.at[i] * (uint32_t)p.axes[i].image_stride;
  }
  return x;
}
// The offset that a tap adds to it.
template <int kNdim>
TW_DEVICE Pixel step_of(const tw_conv_problem& p, int tap) {
  const Spot s = spot_of_tap<kNdim>(p.axes, tap);
  Pixel x = {{0, 0, 0}, 0};
  TW_UNROLL
  for (int i = 3 - kNdim; i < 3; i++) {
    x.at[i] = s.axis(i) * (int)p.axes[i].tap_step;
    x.offset += (uint32_t)x.at[i] * (uint32_t)p.axes[i].image_stride;
  }
  return x;
}
template <int kNdim>
TW_DEVICE bool is_inside(const tw_conv_problem& p, const Pixel& pixel, const Pixel& step) {
  bool inside = true;
  TW_UNROLL
  for (int i = 3 - kNdim; i < 3; i++)
    inside = inside && (uint32_t)(pixel.at[i] + step.at[i]) < (uint32_t)p.axes[i].size;
  return inside;
}

// Which taps of a row meet the image: bits for every axis, in one word. Filters with more taps along an axis than that
// axis has bits are `wide`: their pixels are looked at one by one.
template <int kNdim>
struct TapBits {
  static constexpr int each = kNdim == 1 ? 32 : kNdim == 2 ? 16 : 10;
  TW_DEVICE static bool is_wide(const tw_conv_problem& p) {
    bool wide = false;
    TW_UNROLL
    for (int i = 3 - kNdim; i < 3; i++) wide = wide || p.axes[i].taps > each;
    return wide;
  }
  // The same for several pixels, which share a loop over the taps.
  template <int kCount>
  TW_DEVICE static void of_pixels(uint32_t (&bits)[kCount], const tw_conv_problem& p, const Pixel (&pixels)[kCount]) {
    TW_UNROLL
    for (int j = 0; j < kCount; j++) bits[j] = 0;
    TW_UNROLL
    for (int i = 3 - kNdim; i < 3; i++) {
      const int step = (int)p.axes[i].tap_step, taps = min_of((int)p.axes[i].taps, each);
      const uint32_t size = (uint32_t)p.axes[i].size;
      uint32_t moved = 0, bit = 1u << (each * (2 - i));
      TW_NO_UNROLL
      for (int t = 0; t < taps; t++, moved += (uint32_t)step, bit <<= 1)
        TW_UNROLL
        for (int j = 0; j < kCount; j++) bits[j] |= (uint32_t)pixels[j].at[i] + moved < size ? bit : 0u;
    }
  }
  TW_DEVICE static uint32_t of_tap(const tw_conv_problem& p, int tap) {
    const Spot s = spot_of_tap<kNdim>(p.axes, tap);
    uint32_t bits = 0;
    TW_UNROLL
    for (int i = 3 - kNdim; i < 3; i++) bits |= 1u << ((s.axis(i) + each * (2 - i)) & 31);
    return bits;
  }
};

// ---- rows of the result ----

// See Epilogue in gpu/blocks/epilogue.hpp.
template <class Config>
struct ConvRows {
  static constexpr bool accumulates = Config::accumulate;
  const tw_conv_problem& problem;
  const char* before;  // element (0, 0) of what is added

  TW_DEVICE ConvRows(const tw_conv_problem& of, int64_t item, int element_bytes)
      : problem(of), before((const char*)of.acc + item * of.gemm.stride_c * element_bytes) {}

  TW_DEVICE int64_t operator()(int64_t i) const {
    if constexpr (Config::linear_rows) {
      return i * problem.gemm.ldc;
    } else {
      const Spot s = spot_of_row<Config::ndim>(problem.axes, (int)i);
      int64_t offset = s.n * problem.row_n;
      TW_UNROLL
      for (int axis = 3 - Config::ndim; axis < 3; axis++) offset += s.axis(axis) * problem.axes[axis].row_stride;
      return offset;
    }
  }
  TW_DEVICE int64_t distance() const { return problem.gemm.ldc; }  // of linear rows
  TW_DEVICE bool divisible(int elements) const {
    if constexpr (Config::linear_rows) return problem.gemm.ldc % elements == 0;
    bool divides = problem.row_n % elements == 0;
    TW_UNROLL
    for (int axis = 3 - Config::ndim; axis < 3; axis++)
      divides = divides && problem.axes[axis].row_stride % elements == 0;
    return divides;
  }
};

}  // namespace tw::gpu

// Where the results of a convolution go: the rows of its product are pixels, which may lie anywhere, and gradients may
// be added to what is there.
#pragma once
#include "tilewright/core/args/conv.h"
#include "tilewright/core/meta.hpp"
#include "tilewright/cpu/blocks/epilogue.hpp"

TW_NAMESPACE_BEGIN

// A pixel of all images, by its position along every axis.
struct Pixel {
  int64_t n, at[3];

  static TW_INLINE Pixel of(const tw_conv_axis* axes, int64_t index) {
    Pixel pixel;
    for (int axis = 2; axis >= 0; axis--) pixel.at[axis] = index % axes[axis].rows, index /= axes[axis].rows;
    pixel.n = index;
    return pixel;
  }
  TW_INLINE void advance(const tw_conv_axis* axes) {
    for (int axis = 2; axis >= 0; axis--) {
      if (++at[axis] < axes[axis].rows) return;
      at[axis] = 0;
    }
    n++;
  }
};

struct ConvOutput : Output {
  const tw_conv_problem* conv;
};

constexpr int kMostRows = 64;  // of a register tile

// Rows of the result as the epilogue wants them (see LinearRows).
template <class Config>
struct ConvRows {
  using Output = ConvOutput;
  static constexpr bool linear = Config::linear_rows, accumulates = Config::accumulate,
                        bias_along_rows = Config::bias_rows;
  // Channels-first, an item of the product is an image and a group.
  static constexpr bool items_are_images = Config::channels_first && Config::direction != Direction::backward_weight;

  static TW_INLINE int64_t operand_item(const ConvOutput& out) {
    return items_are_images ? out.item % out.conv->groups : out.item;
  }
  // Element (0, 0) of what is added.
  static TW_INLINE const char* earlier(const ConvOutput& out) {
    return (const char*)out.conv->acc + (out.data - (const char*)out.conv->gemm.c);
  }

  struct Linear {
    const ConvOutput& out;
    int64_t i0;
    TW_INLINE Linear(const ConvOutput& output, int64_t first, int64_t) : out(output), i0(first) {}
    TW_INLINE int64_t operator[](int64_t i) const { return (i0 + i) * out.ld; }
  };
  struct Mapped {
    int64_t offsets[kMostRows];
    TW_INLINE Mapped(const ConvOutput& out, int64_t first, int64_t count) {
      const tw_conv_axis* const axes = out.conv->axes;
      Pixel pixel = Pixel::of(axes, first);
      for (int64_t i = 0; i < count; i++, pixel.advance(axes))
        offsets[i] = pixel.n * out.conv->row_n + pixel.at[0] * axes[0].row_stride + pixel.at[1] * axes[1].row_stride +
                     pixel.at[2] * axes[2].row_stride;
    }
    TW_INLINE int64_t operator[](int64_t i) const { return offsets[i]; }
  };
  using Offsets = Choose<linear, Linear, Mapped>;
};

// Where item `item` of a problem begins in the result.
template <class Config>
TW_INLINE char* result_of(const tw_conv_problem& problem, int64_t item) {
  const int64_t offset = ConvRows<Config>::items_are_images
                             ? item / problem.groups * problem.row_n + item % problem.groups * problem.row_g
                             : item * problem.gemm.stride_c;
  return (char*)problem.gemm.c + offset * size_of<typename Config::C>;
}

TW_NAMESPACE_END

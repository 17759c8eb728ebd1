// The only parameter of a convolution kernel on a GPU, passed by value: a launch head of 64 bytes, then the one task;
// or, where a launch computes several products (the phases of backward data), a table of tasks in device memory, to
// which launch.tasks points. See tilewright/core/args/conv.h for the problem, and gpu/gemm/params.hpp for the rest.
#pragma once
#include "tilewright/core/args/conv.h"
#include "tilewright/gpu/gemm/params.hpp"

namespace tw {

struct ConvTaskProblem {
  tw_conv_problem conv;  // its product's `d` is null: the operands D0, D1, ... follow in the task itself
  int64_t first_tile;    // output tiles, over all batch items, of the tasks before this one
  constexpr const tw_gemm_problem& product() const { return conv.gemm; }
};

// Where a copy engine moves the tensors (gpu/conv/merged/bulk.hpp): boxes of the image and of the result, and the few
// numbers that a workgroup needs before its first pixel, side by side: tiles of pixels, those of a row and of a column
// of an image, and what they are divided by; channels; the place in the image of the first tap of the first pixel; the
// weights.
struct ConvBulk {
  TensorMapBytes image, result;
  int64_t tiles, across, down;
  tw_divisor by_across, by_down;
  int64_t channels, origin_h, origin_w;
  const void* weights;
};
template <bool kBulk>
struct ConvTaskBulk {};
template <>
struct ConvTaskBulk<true> {
  ConvBulk bulk;
};

template <int kD, bool kBulk>
struct alignas(kBulk ? 64 : 8) ConvTask : ConvTaskBulk<kBulk>, ConvTaskProblem, TaskOperands<kD> {
  constexpr const tw_gemm_operand* operands() const {
    if constexpr (kD > 0) return this->d;
    else return nullptr;
  }
};
static_assert(sizeof(ConvTask<0, false>) == 688 && sizeof(ConvTask<2, false>) == 688 + 2 * 32, "no padding");
static_assert(sizeof(ConvBulk) == 384 && sizeof(ConvTask<0, true>) == 1088, "maps lie at multiples of 64 bytes");

template <class Config>
using ConvTaskOf = ConvTask<Config::D::size, Config::pipeline == Pipeline::bulk>;

template <class Config, bool kGrouped = Config::grouped>
struct ConvParams {
  using Task = ConvTaskOf<Config>;
  tw_gemm_launch launch;
  Task task;
};
template <class Config>
struct ConvParams<Config, true> {
  using Task = ConvTaskOf<Config>;
  tw_gemm_launch launch;
};

}  // namespace tw

// The only parameter of a convolution kernel on a GPU, passed by value: a launch head of 64 bytes, then the one task; or,
// where a launch computes several products (the phases of backward data), a table of tasks in device memory, to which
// launch.tasks points. See tilewright/core/conv_args.h for the problem, and gemm_params.hpp for the rest.
#pragma once
#include "tilewright/core/conv_args.h"
#include "tilewright/gpu/gemm_params.hpp"

namespace tw {

struct ConvTaskProblem {
  tw_conv_problem conv;  // its product's `d` is null: the operands D0, D1, ... follow in the task itself
  int64_t first_tile;    // output tiles, over all batch items, of the tasks before this one
  constexpr const tw_gemm_problem& product() const { return conv.gemm; }
};

template <int kD>
struct ConvTask : ConvTaskProblem, TaskOperands<kD> {
  constexpr const tw_gemm_operand* operands() const {
    if constexpr (kD > 0) return this->d;
    else return nullptr;
  }
};
static_assert(sizeof(ConvTask<0>) == 688 && sizeof(ConvTask<2>) == 688 + 2 * 32, "no padding");

template <class Config, bool kGrouped = Config::grouped>
struct ConvParams {
  using Task = ConvTask<Config::D::size>;
  tw_gemm_launch launch;
  Task task;
};
template <class Config>
struct ConvParams<Config, true> {
  using Task = ConvTask<Config::D::size>;
  tw_gemm_launch launch;
};

}  // namespace tw

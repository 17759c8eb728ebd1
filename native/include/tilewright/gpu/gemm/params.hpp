// The only parameter of a GEMM kernel on a GPU, passed by value. The Python side packs the same bytes
// (tilewright_gemm/launch/geometry.py, kernel_args.py): a launch head of 64 bytes, then, unless the GEMM is grouped, the
// one task. The tasks of a grouped GEMM are a table in device memory, to which launch.tasks points.
#pragma once
#include "tilewright/core/args/gemm.h"
#include "tilewright/core/options.hpp"

namespace tw {

// A CUtensorMap: opaque, read only by the copy engine.
struct alignas(64) TensorMapBytes {
  unsigned char bytes[128];
};

template <bool kMaps>
struct TaskMaps {};
template <>
struct TaskMaps<true> {
  TensorMapBytes a, b, c;
};

struct TaskProblem {
  tw_gemm_problem problem;  // its `d` is null: the operands D0, D1, ... follow in the task itself
  int64_t first_tile;       // output tiles, over all batch items, of the tasks before this one
  constexpr const tw_gemm_problem& product() const { return problem; }
};

template <int kD>
struct TaskOperands {
  tw_gemm_operand d[kD];
};
template <>
struct TaskOperands<0> {};

// One problem. Empty bases take no room: what a kernel does not use is absent.
template <int kD, bool kMaps>
struct alignas(kMaps ? 64 : 8) GemmTask : TaskMaps<kMaps>, TaskProblem, TaskOperands<kD> {
  constexpr const tw_gemm_operand* operands() const {
    if constexpr (kD > 0) return this->d;
    else return nullptr;
  }
};

static_assert(sizeof(tw_gemm_launch) == 64 && sizeof(tw_gemm_problem) == 232, "as the plugin packs them");
static_assert(sizeof(GemmTask<0, false>) == 240 && sizeof(GemmTask<3, false>) == 240 + 3 * 32, "no padding");
static_assert(sizeof(GemmTask<0, true>) == 640 && sizeof(GemmTask<1, true>) == 704, "384 bytes of maps come first");

template <class Config>
using GemmTaskOf = GemmTask<Config::D::size, Config::pipeline == Pipeline::ws>;

template <class Config, bool kGrouped = Config::grouped>
struct GemmParams {
  using Task = GemmTaskOf<Config>;
  tw_gemm_launch launch;
  Task task;
};
template <class Config>
struct GemmParams<Config, true> {
  using Task = GemmTaskOf<Config>;
  tw_gemm_launch launch;
};

}  // namespace tw

// Entry points of a convolution's unit, with C linkage. The header of its kind of kernel (cpu/conv/implicit_gemm.hpp,
// cpu/conv/depthwise/depthwise.hpp, ...) says what ConvKernel<Config> is; what is not exported is not compiled:
//   TW_CONV_MAIN(name, Config)
//     name            the whole computation, for all problems and items
//   TW_CONV_SPLIT(name, Config)
//     name            as above, for when k is too short to be sliced
//     name_partial    first stage: accumulators of every slice of k to the workspace
//     name_reduce     second stage: adds the slices in their order (so the result never varies), applies the epilogue
//   TW_CONV_WORKSPACE(name, Config)
//     name_workspace  int64_t(const tw_conv_args*): bytes of workspace that a launch with these args needs
// All but the last have the signature tw_cpu_kernel, with tw_conv_args as args.
#pragma once
#include "tilewright/core/args/conv.h"
#include "tilewright/cpu/team.h"

#define TW_CONV_EXPORT extern "C" __attribute__((visibility("default")))
#define TW_CONV_MAIN(NAME, CONFIG)                                                 \
  TW_CONV_EXPORT void NAME(const void* args, tw_team* team) {                      \
    tw::ConvKernel<CONFIG>::run(*(const tw_conv_args*)args, team, false);          \
  }
// All of it and slices share their code, which learns at run time what it is asked for.
#define TW_CONV_SPLIT(NAME, CONFIG)                                                                 \
  static __attribute__((noinline)) void NAME##_run(const void* args, tw_team* team, bool partial) { \
    tw::ConvKernel<CONFIG>::run(*(const tw_conv_args*)args, team, partial);                         \
  }                                                                                                 \
  TW_CONV_EXPORT void NAME(const void* args, tw_team* team) { NAME##_run(args, team, false); }      \
  TW_CONV_EXPORT void NAME##_partial(const void* args, tw_team* team) {                             \
    NAME##_run(args, team, true);                                                                   \
  }                                                                                                 \
  TW_CONV_EXPORT void NAME##_reduce(const void* args, tw_team* team) {                              \
    tw::ConvKernel<CONFIG>::reduce(*(const tw_conv_args*)args, team);                               \
  }
#define TW_CONV_WORKSPACE(NAME, CONFIG)                              \
  TW_CONV_EXPORT int64_t NAME##_workspace(const tw_conv_args* args) { \
    return tw::ConvKernel<CONFIG>::workspace(*args);                 \
  }

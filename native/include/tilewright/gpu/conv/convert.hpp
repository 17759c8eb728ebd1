// The second stage of a gradient of the weights: adds the partial sums of all slices in a fixed order, and stores the
// result. Launched with kConvertThreads threads. Of many slices a workgroup converts fewer elements, of which several
// threads add a part of the slices each: one thread would wait for memory many times over. Shared memory: four bytes for
// every thread, where lanes are more than one.
#pragma once
#include "tilewright/gpu/conv/params.hpp"
#include "tilewright/gpu/blocks/epilogue.hpp"
#include "tilewright/gpu/conv/image.hpp"

namespace tw::gpu {

constexpr int kConvertThreads = 256;

#if defined(__HIP__)
template <class Config>
constexpr int convert_lanes = 1;
#else
template <class Config>
constexpr int convert_lanes = Config::split_k >= 64 ? 16 : Config::split_k >= 16 ? 8 : Config::split_k >= 8 ? 4 : 1;
#endif

// A plan may let the second launch begin before the first has ended (sm_90 and later): the first says so as soon as its
// workgroups have their places, and the second waits for all that it wrote. Neither does anything elsewhere.
TW_DEVICE void release_convert() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
TW_DEVICE void wait_for_sums() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
TW_DEVICE float load_sum(const char* from) {
#if defined(__HIP__)
  return load_constant<float>(from);
#else
  return float_of(load_coherent<1>(from).w[0]);  // which stays behind the wait
#endif
}

// Element t of [item][m][n] is thread t's, over all workgroups; the workspace is launch.split_k times as many sums in fp32.
template <class Config>
TW_DEVICE void convert_partial_sums(const ConvParams<Config>& params) {
  constexpr int kLanes = convert_lanes<Config>, kElements = kConvertThreads / kLanes;
  const tw_conv_problem& problem = params.task.conv;
  const tw_gemm_problem& g = problem.gemm;
  const int64_t each = g.m * g.n, total = each * g.batch;
  const int thread = thread_index(), first = kLanes > 1 ? thread / kElements : 0;
  const int64_t at = (int64_t)block_index() * kElements + (kLanes > 1 ? thread % kElements : thread);
  if (kLanes == 1 && at >= total) return;
  const char* const from = (const char*)params.launch.workspace + at * 4;
  float sum = 0.0f;
  wait_for_sums();
  if constexpr (kLanes > 1) {
    constexpr int kMost = (Config::split_k + kLanes - 1) / kLanes;  // all of them at once
    const int slices = (int)params.launch.split_k;
    float x[kMost];
    TW_UNROLL
    for (int i = 0; i < kMost; i++) {
      const int s = first + i * kLanes;
      x[i] = 0.0f;
      if (at < total && s < slices) x[i] = load_sum(from + s * total * 4);
    }
    TW_UNROLL
    for (int i = 0; i < kMost; i++) sum += x[i];
  } else {
    TW_UNROLL_BY(8)
    for (int s = 0; s < (int)params.launch.split_k; s++) sum += load_sum(from + s * total * 4);
  }
  if constexpr (kLanes > 1) {
    const uint32_t shared = shared_base() + thread * 4;
    store_shared<1>(shared, {bits_of(sum)});
    barrier();
    if (first > 0 || at >= total) return;
    TW_UNROLL
    for (int lane = 1; lane < kLanes; lane++) sum += float_of(load_shared<1>(shared + lane * (kElements * 4)).w[0]);
  }
  const int64_t item = at / each, i = (at - item * each) / g.n, j = at - item * each - i * g.n;
  using Finish = Epilogue<Config, float, ConvRows<Config>>;
  const ConvRows<Config> rows(problem, item, size_of<typename Config::C>);
  const Finish finish(g, nullptr, item, rows);
  const float x[1] = {sum};
  finish.store(x, finish.template columns<1>(j, 1), i, j, 1);
}

}  // namespace tw::gpu

#define TW_CONV_CONVERT(NAME, ...) \
  TW_KERNEL(tw::gpu::kConvertThreads, 1, NAME, tw::ConvParams<__VA_ARGS__>, \
            tw::gpu::convert_partial_sums<__VA_ARGS__>(params);)

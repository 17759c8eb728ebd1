// The second stage of a gradient of the weights: adds the partial sums of all slices in their order, and stores the
// result. Launched with kConvertThreads threads, a workgroup for every so many elements of the result.
#pragma once
#include "tilewright/gpu/conv_params.hpp"
#include "tilewright/gpu/epilogue.hpp"
#include "tilewright/gpu/image.hpp"

namespace tw::gpu {

constexpr int kConvertThreads = 256;

// Thread t converts element t of [item][m][n]; the workspace is launch.split_k times as many sums in fp32.
template <class Config>
TW_DEVICE void convert_partial_sums(const ConvParams<Config>& params) {
  const tw_conv_problem& problem = params.task.conv;
  const tw_gemm_problem& g = problem.gemm;
  const int64_t each = g.m * g.n, total = each * g.batch;
  const int64_t at = (int64_t)block_index() * kConvertThreads + thread_index();
  if (at >= total) return;
  const int64_t item = at / each, i = (at - item * each) / g.n, j = at - item * each - i * g.n;
  const char* const from = (const char*)params.launch.workspace + at * 4;
  float sum = 0.0f;
  TW_UNROLL_BY(8)
  for (int s = 0; s < (int)params.launch.split_k; s++) sum += load_constant<float>(from + s * total * 4);
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

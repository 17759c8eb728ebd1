// Packs B for the pipeline preshufflev2 of AMD GPUs: gpu/amd/packed.hpp says how packed B lies. A source unit states
// the Config of a kernel that reads it and writes TW_PACK_B_KERNEL(symbol, Config).
//
// Of the parameter (GemmParams, see gpu/gemm/params.hpp) n, k, b and ldb are read; c is where packed B goes. Every
// thread writes vectors of 16 bytes, which hold consecutive k of one column; what lies outside B is zero. B may begin
// anywhere. Launch: any number of workgroups of PackB::threads threads, no shared memory.
#pragma once
#include "tilewright/gpu/amd/convert.hpp"
#include "tilewright/gpu/gemm/params.hpp"
#include "tilewright/gpu/amd/packed.hpp"

namespace tw::gpu {

template <class Config>
struct PackB {
  using Element = typename Config::B;
  static constexpr int threads = 256, size = size_of<Element>, columns = Config::warp_tile_n;
  static constexpr int values = kPackedVector / size;
  template <int kBytes>
  struct Raw {
    alignas(kBytes) unsigned char bytes[kBytes];
  };

  TW_DEVICE static void run(const GemmParams<Config>& params) {
    const tw_gemm_problem& problem = params.task.problem;
    const int64_t stride = packed_stride(problem.k, columns, size), vectors = stride / values;
    const int64_t total = (problem.n + columns - 1) / columns * vectors;
    for (int64_t id = (int64_t)block_index() * threads + thread_index(); id < total; id += (int64_t)block_count() * threads) {
      const int64_t j = id / vectors * columns + id % columns, k = id % vectors / columns * values;
      uint32_t words[4] = {};
      TW_UNROLL
      for (int v = 0; v < values; v++) {
        if (j >= problem.n || k + v >= problem.k) continue;
        const int64_t place = Config::b_col ? j * problem.ldb + k + v : (k + v) * problem.ldb + j;
        const auto raw = load_constant<Raw<size>>((const char*)problem.b + place * size);
        uint32_t bits = 0;
        TW_UNROLL
        for (int b = 0; b < size; b++) bits |= (uint32_t)raw.bytes[b] << (b * 8);
        words[v * size / 4] |= bits << (v * size % 4 * 8);
      }
      Words<4> x;
      TW_UNROLL
      for (int w = 0; w < 4; w++) x.w[w] = words[w];
      store_global((char*)problem.c + packed_index(k, j, columns, size, stride) * size, x);
    }
  }
};

}  // namespace tw::gpu

#define TW_PACK_B_KERNEL(NAME, ...) \
  TW_KERNEL(tw::gpu::PackB<__VA_ARGS__>::threads, 1, NAME, tw::GemmParams<__VA_ARGS__>, \
            tw::gpu::PackB<__VA_ARGS__>::run(params);)

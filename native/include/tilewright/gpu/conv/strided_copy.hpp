// A strided copy with conversion on GPUs: what brings tensors into an order that a kernel takes, and back. Config
// states From and To; a generated source unit writes TW_TRANSFORM_KERNEL(symbol, Config). The parameter is
// tw_transform_args.
//
// A workgroup copies kTransformTile x kTransformTile elements of the last two dimensions by way of shared memory: it
// reads along whichever of the two lies closer in the source, and writes along the last. Launch: as many workgroups as
// there are tiles, kTransformThreads threads, Transform::shared_bytes of shared memory.
#pragma once
#include "tilewright/core/args/strided_copy.h"
#include "tilewright/gpu/blocks/convert.hpp"

namespace tw::gpu {

constexpr int kTransformTile = 32, kTransformThreads = 256;

template <class Config>
struct Transform {
  using From = typename Config::From;
  using To = typename Config::To;
  static constexpr bool same = is_same<From, To>;
  static constexpr int kLine = kTransformTile + 1, shared_bytes = kTransformTile * kLine * 4;
  static constexpr int kRows = kTransformThreads / kTransformTile;

  // An element's bits, or its value as fp32 where the type changes.
  TW_DEVICE static uint32_t get(const void* from) {
    const auto raw = load_constant<typename From::storage>(from);
    if constexpr (!same) return bits_of(to_float<From>(raw));
    else if constexpr (is_same<From, fp32>) return bits_of(raw);
    else return (uint32_t)raw;
  }
  TW_DEVICE static void put(void* to, uint32_t bits) {
    using Storage = typename To::storage;
    if constexpr (!same) store_global(to, from_float<To>(float_of(bits)));
    else if constexpr (is_same<To, fp32>) store_global(to, float_of(bits));
    else store_global(to, (Storage)bits);
  }

  TW_DEVICE static void run(const tw_transform_args& p) {
    const int thread = thread_index(), across = thread % kTransformTile, down = thread / kTransformTile;
    constexpr int64_t kTile = kTransformTile;
    const int64_t columns = ceil_div(p.sizes[5], kTile), rows = ceil_div(p.sizes[4], kTile);
    int64_t rest = block_index();
    const int64_t column = rest % columns * kTransformTile;
    rest /= columns;
    const int64_t row = rest % rows * kTransformTile;
    rest /= rows;
    const char* from = (const char*)p.from;
    char* to = (char*)p.to;
    bool kept = true;
    TW_UNROLL
    for (int dim = 3; dim >= 0; dim--) {
      const int64_t at = rest % p.sizes[dim];
      rest /= p.sizes[dim];
      from += at * p.from_strides[dim] * size_of<From>, to += at * p.to_strides[dim] * size_of<To>;
      kept = kept && at < p.kept[dim];
    }
    const bool turns = p.from_strides[4] < p.from_strides[5];
    TW_UNROLL
    for (int i = 0; i < kTransformTile; i += kRows) {
      const int r = turns ? across : down + i, c = turns ? down + i : across;
      uint32_t x = 0;
      if (kept && row + r < p.kept[4] && column + c < p.kept[5])
        x = get(from + ((row + r) * p.from_strides[4] + (column + c) * p.from_strides[5]) * size_of<From>);
      store_shared<1>(shared_base() + (r * kLine + c) * 4, {x});
    }
    barrier();
    TW_UNROLL
    for (int i = 0; i < kTransformTile; i += kRows) {
      const int r = down + i, c = across;
      if (row + r < p.sizes[4] && column + c < p.sizes[5])
        put(to + ((row + r) * p.to_strides[4] + (column + c) * p.to_strides[5]) * size_of<To>,
            load_shared<1>(shared_base() + (r * kLine + c) * 4).w[0]);
    }
  }
};

}  // namespace tw::gpu

#define TW_TRANSFORM_KERNEL(NAME, ...) \
  TW_KERNEL(tw::gpu::kTransformThreads, 1, NAME, tw_transform_args, tw::gpu::Transform<__VA_ARGS__>::run(params);)

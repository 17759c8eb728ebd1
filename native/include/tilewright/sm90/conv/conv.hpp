// Convolution of Hopper's ws pipeline: the GEMM of sm90/gemm/gemm.hpp with a producer that gathers pixels by the copy
// engine (im2col maps). Consumers, scheduler, split-K, Stream-K and epilogues are the GEMM's, and so are the conditions on
// its configuration, to which come
//   direction  forward (layout rcr), backward_data (rrr), backward_weight (crr); ndim: spatial axes, 1 to 3
//   tile_k     forward, backward_data: 128 bytes; backward_weight: any
//   others     one task, no transpose_c
//   channels   rows of channels are multiples of 16 bytes; with several groups, and for backward weight without
//              `tap_items`, channels of a group are multiples of 128 bytes
//   maps       what im2col maps hold: corners and offsets of 16 bits (one axis), 8 (two) or 5 (three), strides up to 8
#pragma once
#include "tilewright/sm90/conv/loaders.hpp"
#include "tilewright/sm90/gemm/gemm.hpp"

namespace tw::sm90 {

template <class C, bool kWeight = C::direction == Direction::backward_weight>
struct ConvLoader {
  using type = PixelRowLoader<GemmPlan<C>>;
};
template <class C>
struct ConvLoader<C, true> {
  using type = PixelColumnLoader<GemmPlan<C>>;
};

template <class C>
using Conv = Gemm<C, ConvProducer<GemmPlan<C>, typename ConvLoader<C>::type>>;

}  // namespace tw::sm90

#define TW_CONV_KERNEL(NAME, CONFIG)                                               \
  extern "C" __global__ void __launch_bounds__(tw::sm90::Conv<CONFIG>::threads, 1) \
      NAME(const __grid_constant__ tw::Sm90ConvParams<CONFIG> params) {            \
    tw::sm90::Conv<CONFIG>::run(params);                                           \
  }

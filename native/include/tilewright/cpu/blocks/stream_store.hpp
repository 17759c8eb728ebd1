// Stores that leave caches alone, for results that no cache would hold until they are read; and two vectors of fp32 as
// one of bf16.
#pragma once
#include "tilewright/core/args/conv.h"
#include "tilewright/core/types.hpp"

#if defined(__AVX512BF16__) && TW_VECTOR_BYTES == 64
#define TW_PAIRS_OF_BF16 1
#else
#define TW_PAIRS_OF_BF16 0
#endif

TW_NAMESPACE_BEGIN

constexpr bool can_stream = TW_VECTOR_BYTES == 64;
constexpr int64_t kStreamBytes = 4 << 20;  // of results: one core of eight has so much of a last-level cache

// A vector to an address that is a multiple of its size.
template <class V>
TW_INLINE void stream_as(void* to, V value) {
#if TW_VECTOR_BYTES == 64 && defined(__clang__)
  __builtin_nontemporal_store((f32v)value, (f32v*)to);
#elif TW_VECTOR_BYTES == 64
  __builtin_ia32_movntps512((float*)to, (f32v)value);
#else
  store_as(to, value);
#endif
}

// Before anyone else is told that results are there.
TW_INLINE void end_streams() {
#if TW_VECTOR_BYTES == 64
  __builtin_ia32_sfence();
#endif
}

// True if results of `channels` in all, so many bytes each, exceed a cache and come in whole vectors. They
// are not read again soon, and would only be in the way.
TW_INLINE bool streams_result(const tw_conv_problem& p, int64_t channels, int64_t bytes) {
  if (!can_stream) return false;
  const tw_conv_axis* const axes = p.axes;
  const int64_t strides = p.row_n | axes[0].row_stride | axes[1].row_stride | axes[2].row_stride | channels;
  return p.images * axes[0].rows * axes[1].rows * axes[2].rows * channels * bytes >= kStreamBytes &&
         (uintptr_t)p.gemm.c % kVectorBytes == 0 && strides * bytes % kVectorBytes == 0;
}

#if TW_PAIRS_OF_BF16
// Rounded as encode_lanes<bf16> does, but that what is subnormal becomes zero.
TW_INLINE u16v narrow_to_bf16(f32v low, f32v high) {
#if defined(__clang__)
  return (u16v)__builtin_ia32_cvtne2ps2bf16_512(high, low);
#elif __GNUC__ >= 13
  return (u16v)__builtin_ia32_cvtne2ps2bf16_v32bf(high, low);
#else
  return (u16v)__builtin_ia32_cvtne2ps2bf16_v32hi(high, low);
#endif
}
#endif

TW_NAMESPACE_END

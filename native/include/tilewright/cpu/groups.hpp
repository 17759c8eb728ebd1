// From elements in memory to groups: one vector of L groups (see dot.hpp), read along k or across it, converted on the
// way. Packing and the streaming kernels share these.
#pragma once
#include "tilewright/cpu/dot.hpp"

TW_NAMESPACE_BEGIN

// raw[d]: the bits of L elements with k = depth*group + d. E: the element type, Dot: the step that the groups are for.
template <class E, class Dot>
TW_INLINE u32v combine_raw(const u32v* raw) {
  if constexpr (Dot::depth == 1 && Dot::is_float) return (u32v)decode_lanes<E>(raw[0]);
  else if constexpr (Dot::depth == 1) return (u32v)((i32v)(raw[0] << 24) >> 24);
  else if constexpr (Dot::depth == 2 && is_same<E, bf16>) return raw[0] | (raw[1] << 16);
  else if constexpr (Dot::depth == 2 && Dot::is_float)  // fp8 and bf8 are exact in bf16
    return ((u32v)decode_lanes<E>(raw[0]) >> 16) | ((u32v)decode_lanes<E>(raw[1]) & 0xffff0000u);
  else if constexpr (Dot::depth == 2)
    return ((u32v)((i32v)(raw[0] << 24) >> 24) & 0xffffu) | ((u32v)((i32v)(raw[1] << 24) >> 8) & 0xffff0000u);
  else return raw[0] | (raw[1] << 8) | (raw[2] << 16) | (raw[3] << 24);
}

// L groups from L*depth elements that lie one after the other (k contiguous).
template <class E, class Dot>
TW_INLINE u32v load_groups_along_k(const char* from) {
  if constexpr (size_of<E> * Dot::depth == 4) {
    return load_as<u32v>(from);
  } else if constexpr (Dot::depth == 1) {
    if constexpr (Dot::is_float) return (u32v)load_f32<E>(from);
    else return (u32v)((i32v)(widen_u8(from) << 24) >> 24);
  } else {
    const u32v pair = widen_u16(from), raw[2] = {pair & 0xffu, pair >> 8};
    return combine_raw<E, Dot>(raw);
  }
}

// The same when only `elements` (0 to L*depth) exist; the rest counts as zero and is not read.
template <class E, class Dot>
TW_INLINE u32v load_groups_along_k(const char* from, int64_t elements) {
  if (elements >= kLanes * Dot::depth) return load_groups_along_k<E, Dot>(from);
  alignas(64) char buffer[kLanes * Dot::depth * size_of<E>] = {};
  if (elements > 0) __builtin_memcpy(buffer, from, (size_t)elements * size_of<E>);
  return load_groups_along_k<E, Dot>(buffer);
}

// kCount (1 to L) groups from `depth` rows that lie row_bytes apart, each with kCount contiguous elements: k runs
// across the rows.
template <class E, class Dot, int kCount = kLanes>
TW_INLINE u32v load_groups_across_k(const char* from, int64_t row_bytes) {
  if constexpr (kCount == kLanes && Dot::depth == 1) {
    return load_groups_along_k<E, Dot>(from);  // one row: nothing to interleave
  } else {
    u32v raw[Dot::depth];
    TW_UNROLL
    for (int d = 0; d < Dot::depth; d++) {
      if constexpr (kCount == kLanes) {
        raw[d] = load_raw<E>(from + d * row_bytes);
      } else {
        alignas(64) char buffer[kLanes * size_of<E>] = {};
        __builtin_memcpy(buffer, from + d * row_bytes, kCount * size_of<E>);
        raw[d] = load_raw<E>(buffer);
      }
    }
    if constexpr (is_same<E, fp32>) return raw[0];
    else return combine_raw<E, Dot>(raw);
  }
}

// The same when only `count` elements of each of `rows` rows exist.
template <class E, class Dot>
TW_INLINE u32v load_groups_across_k(const char* from, int64_t row_bytes, int64_t rows, int64_t count) {
  alignas(64) char buffer[Dot::depth][kLanes * size_of<E>] = {};
  for (int64_t d = 0; d < rows && d < Dot::depth; d++)
    if (count > 0) __builtin_memcpy(buffer[d], from + d * row_bytes, (size_t)min_of(count, kLanes) * size_of<E>);
  return load_groups_across_k<E, Dot>(buffer[0], kLanes * size_of<E>);
}

TW_NAMESPACE_END

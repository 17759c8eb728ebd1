// From elements in memory to groups: one vector of L groups (see cpu/blocks/dot.hpp), read along k or across it,
// converted on the way. Packing and the streaming kernels share these.
#pragma once
#include "tilewright/cpu/blocks/dot.hpp"

TW_NAMESPACE_BEGIN

// raw[d]: the bits of L elements with k = 2*group + d. E: the element type, Dot: the step that the groups are for.
template <class E, class Dot>
TW_INLINE u32v combine_raw(const u32v* raw) {
  static_assert(Dot::depth == 2, "one element needs nothing, four have interleave_rows");
  if constexpr (is_same<E, bf16>) return raw[0] | (raw[1] << 16);
  else if constexpr (Dot::is_float)  // fp8 and bf8 are exact in bf16
    return ((u32v)decode_lanes<E>(raw[0]) >> 16) | ((u32v)decode_lanes<E>(raw[1]) & 0xffff0000u);
  else return ((u32v)((i32v)(raw[0] << 24) >> 24) & 0xffffu) | ((u32v)((i32v)(raw[1] << 24) >> 8) & 0xffff0000u);
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

// L bytes of each of four rows that lie row_bytes apart, interleaved: byte d of lane c is byte c of row d.
template <class V, int... kI>
TW_INLINE auto join(V a, V b, Sequence<kI...>) {
  return __builtin_shufflevector(a, b, kI...);
}
template <int... kI>
TW_INLINE u32v rows_to_quarters(u32v x, Sequence<kI...>) {
  return __builtin_shufflevector(x, x, (kI % 4 * (kLanes / 4) + kI / 4)...);
}
template <class V, int... kI>
TW_INLINE u32v transpose_bytes(V x, Sequence<kI...>) {
  return (u32v)__builtin_shufflevector(x, x, (kI / 16 * 16 + kI % 4 * 4 + kI % 16 / 4)...);
}
TW_INLINE u32v interleave_rows(const char* from, int64_t row_bytes) {
  typedef uint8_t u8v __attribute__((vector_size(kVectorBytes)));
  constexpr auto half = MakeSequence<kVectorBytes / 2>::type{};
  constexpr auto all = MakeSequence<kVectorBytes>::type{};
  const auto top = join(load_as<u8_quarter>(from), load_as<u8_quarter>(from + row_bytes), half);
  const auto low = join(load_as<u8_quarter>(from + 2 * row_bytes), load_as<u8_quarter>(from + 3 * row_bytes), half);
  return transpose_bytes((u8v)rows_to_quarters((u32v)join(top, low, all), MakeSequence<kLanes>::type{}), all);
}

// L groups from `depth` rows that lie row_bytes apart, each with L contiguous elements: k runs across the rows.
template <class E, class Dot>
TW_INLINE u32v load_groups_across_k(const char* from, int64_t row_bytes) {
  if constexpr (Dot::depth == 1) {
    return load_groups_along_k<E, Dot>(from);  // one row: nothing to interleave
  } else if constexpr (Dot::depth == 4) {
    return interleave_rows(from, row_bytes);
  } else {
    u32v raw[Dot::depth];
    TW_UNROLL
    for (int d = 0; d < Dot::depth; d++) raw[d] = load_raw<E>(from + d * row_bytes);
    return combine_raw<E, Dot>(raw);
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

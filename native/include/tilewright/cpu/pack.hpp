// Packing: the panel format that the microkernel reads.
//
// An operand of `extent` rows (of A) or columns (of B) and depth k is packed as
//     [ceil(extent / R)] [ceil(k / depth)] [R] groups of 32 bits
// with R the register tile of that side (MR or NR) and group g of row r holding elements k = depth*g ... depth*g +
// depth-1 (see dot.hpp for `depth`). Rows and values of k that do not exist are zero. Every panel keeps its whole k
// together, so that any cache blocking can read it: the format depends on the element type, R and depth only. With
// DotI8 the values of A carry an offset of 128, and B is followed by the int32 array [ceil(extent / R) * R] of -128
// times the sum of each column, which undoes it.
#pragma once
#include "tilewright/cpu/groups.hpp"

TW_NAMESPACE_BEGIN

// Size of a packed operand, a multiple of 64 bytes. This formula is the contract of pre-shuffled B (with_sums: DotI8).
constexpr int64_t packed_bytes(int64_t extent, int64_t k, int r, int depth, bool with_sums) {
  return round_up(ceil_div(extent, r) * r * 4 * (ceil_div(k, depth) + (with_sums ? 1 : 0)), 64);
}

// Rows of a matrix in memory: element (r, k) lies at data[r*ld + k] if k is contiguous, else at data[k*ld + r]; ld in
// elements.
template <class E, bool kAlongK>
struct Rows {
  const char* data;
  int64_t ld;
  TW_INLINE const char* at(int64_t r, int64_t k) const {
    return data + (kAlongK ? r * ld + k : k * ld + r) * size_of<E>;
  }
};

template <int... kI>
TW_INLINE u32v zip_low_32(u32v a, u32v b, Sequence<kI...>) {
  return __builtin_shufflevector(a, b, (kI / 4 * 4 + kI % 4 / 2 + kI % 2 * kLanes)...);
}
template <int... kI>
TW_INLINE u32v zip_high_32(u32v a, u32v b, Sequence<kI...>) {
  return __builtin_shufflevector(a, b, (kI / 4 * 4 + 2 + kI % 4 / 2 + kI % 2 * kLanes)...);
}
template <int... kI>
TW_INLINE u32v zip_low_64(u32v a, u32v b, Sequence<kI...>) {
  return __builtin_shufflevector(a, b, (kI / 4 * 4 + kI % 2 + kI % 4 / 2 * kLanes)...);
}
template <int... kI>
TW_INLINE u32v zip_high_64(u32v a, u32v b, Sequence<kI...>) {
  return __builtin_shufflevector(a, b, (kI / 4 * 4 + 2 + kI % 2 + kI % 4 / 2 * kLanes)...);
}
// The even (kOdd = 0) or odd 128-bit quarters of a, then those of b.
template <int kOdd, int... kI>
TW_INLINE u32v quarters(u32v a, u32v b, Sequence<kI...>) {
  return __builtin_shufflevector(a, b, (kI / (kLanes / 2) * kLanes + kI % (kLanes / 2) / 4 * 8 + kOdd * 4 + kI % 4)...);
}

// Transposes an L x L block of groups in place: within 128-bit quarters first (cheap shuffles), then the quarters.
TW_INLINE void transpose(u32v* r) {
  constexpr auto all = MakeSequence<kLanes>::type{};
  u32v t[kLanes];
  TW_UNROLL
  for (int i = 0; i < kLanes; i += 4) {
    const u32v low01 = zip_low_32(r[i], r[i + 1], all), high01 = zip_high_32(r[i], r[i + 1], all);
    const u32v low23 = zip_low_32(r[i + 2], r[i + 3], all), high23 = zip_high_32(r[i + 2], r[i + 3], all);
    t[i] = zip_low_64(low01, low23, all), t[i + 1] = zip_high_64(low01, low23, all);
    t[i + 2] = zip_low_64(high01, high23, all), t[i + 3] = zip_high_64(high01, high23, all);
  }
  // Quarter q of t[4*i + c] is now column 4*q + c of rows 4*i to 4*i + 3.
  TW_UNROLL
  for (int c = 0; c < 4; c++) {
    if constexpr (kLanes == 4) {
      r[c] = t[c];
    } else if constexpr (kLanes == 8) {
      r[c] = quarters<0>(t[c], t[4 + c], all), r[4 + c] = quarters<1>(t[c], t[4 + c], all);
    } else {
      const u32v even_top = quarters<0>(t[c], t[4 + c], all), odd_top = quarters<1>(t[c], t[4 + c], all);
      const u32v even_low = quarters<0>(t[8 + c], t[12 + c], all), odd_low = quarters<1>(t[8 + c], t[12 + c], all);
      r[c] = quarters<0>(even_top, even_low, all), r[8 + c] = quarters<1>(even_top, even_low, all);
      r[4 + c] = quarters<0>(odd_top, odd_low, all), r[12 + c] = quarters<1>(odd_top, odd_low, all);
    }
  }
}

// kWidth (1 to L) rows by L groups, all of them readable: transposed into L rows of kWidth groups, to_step apart.
template <class E, class Dot, int kWidth, bool kOffset>
TW_NOINLINE void pack_block(const char* from, int64_t line, uint32_t* to, int64_t to_step) {
  u32v block[kLanes];
  TW_UNROLL
  for (int i = 0; i < kLanes; i++) {
    block[i] = u32v{};
    if (i < kWidth) block[i] = load_groups_along_k<E, Dot>(from + i * line);
    if constexpr (kOffset) block[i] ^= 0x80808080u;
  }
  transpose(block);
  TW_UNROLL
  for (int g = 0; g < kLanes; g++) __builtin_memcpy(to + g * to_step, &block[g], kWidth * 4);
}

// The same at the edges, where only `rows` rows of `elements` elements exist: by way of a copy that has all of them.
template <class E, class Dot, int kWidth, bool kOffset>
TW_NOINLINE void pack_edge_block(const char* from, int64_t line, int64_t rows, int64_t elements, uint32_t* to,
                                 int64_t to_step) {
  constexpr int kLine = kLanes * Dot::depth * size_of<E>;
  alignas(64) char copy[kWidth * kLine] = {};
  uint32_t packed[kLanes * kWidth];
  const int64_t bytes = min_of(elements * size_of<E>, kLine), groups = min_of(ceil_div(elements, Dot::depth), kLanes);
  for (int64_t i = 0; i < min_of(rows, kWidth); i++) __builtin_memcpy(copy + i * kLine, from + i * line, (size_t)bytes);
  pack_block<E, Dot, kWidth, kOffset>(copy, kLine, packed, kWidth);
  for (int64_t g = 0; g < groups; g++) __builtin_memcpy(to + g * to_step, packed + g * kWidth, kWidth * 4);
}

template <class E, class Dot, int kWidth, int kR, bool kOffset>
TW_INLINE void pack_columns(Rows<E, true> rows, int64_t first, int64_t count, int64_t k, uint32_t* to) {
  const int64_t line = rows.ld * size_of<E>;
  for (int64_t k0 = 0; k0 < k; k0 += kLanes * Dot::depth, to += kLanes * kR) {
    if (count - first >= kWidth && k - k0 >= kLanes * Dot::depth)
      pack_block<E, Dot, kWidth, kOffset>(rows.at(first, k0), line, to + first, kR);
    else pack_edge_block<E, Dot, kWidth, kOffset>(rows.at(first, k0), line, count - first, k - k0, to + first, kR);
  }
}

// One panel from rows whose k is contiguous: blocks of L rows and L groups are transposed in registers.
template <class E, class Dot, int kR, bool kOffset>
TW_INLINE void pack_panel_along_k(Rows<E, true> rows, int64_t count, int64_t k, uint32_t* to) {
  constexpr int kWhole = kR / kLanes * kLanes, kRest = kR % kLanes;
  for (int h = 0; h < kWhole; h += kLanes) pack_columns<E, Dot, kLanes, kR, kOffset>(rows, h, count, k, to);
  if constexpr (kRest > 0) pack_columns<E, Dot, kRest, kR, kOffset>(rows, kWhole, count, k, to);
}

// One panel from rows that are contiguous themselves (k runs across): groups are interleaved from `depth` lines.
template <class E, class Dot, int kR, bool kOffset>
TW_INLINE void pack_panel_across_k(Rows<E, false> rows, int64_t count, int64_t k, uint32_t* to) {
  // Every line of the source may lie on a page of its own, where the processor's prefetcher does not follow: ask for
  // lines ahead ourselves.
  constexpr int kAhead = 16;
  const int64_t line = rows.ld * size_of<E>;
  for (int64_t k0 = 0; k0 < k; k0 += Dot::depth, to += kR) {
    TW_UNROLL
    for (int d = 0; d < Dot::depth; d++)
      TW_UNROLL
      for (int byte = 0; byte < kR * size_of<E>; byte += 64)
        __builtin_prefetch(rows.at(0, k0 + kAhead + d) + byte, 0, 3);
    const bool whole = count >= kR && k - k0 >= Dot::depth;
    TW_UNROLL
    for (int h = 0; h < kR; h += kLanes) {
      constexpr int kRest = kR % kLanes ? kR % kLanes : kLanes;
      const bool narrow = h + kLanes > kR;
      u32v groups;
      if (!whole) groups = load_groups_across_k<E, Dot>(rows.at(h, k0), line, k - k0, min_of(count, kR) - h);
      else if (narrow) groups = load_groups_across_k<E, Dot, kRest>(rows.at(h, k0), line);
      else groups = load_groups_across_k<E, Dot>(rows.at(h, k0), line);
      if constexpr (kOffset) groups ^= 0x80808080u;
      __builtin_memcpy(to + h, &groups, narrow ? kRest * 4 : kVectorBytes);
    }
  }
}

// Packs up to kR rows (`count` of them exist) and k values into ceil(k / depth) * kR groups.
template <class E, class Dot, int kR, bool kAlongK, bool kOffset>
TW_NOINLINE void pack_panel(Rows<E, kAlongK> rows, int64_t count, int64_t k, uint32_t* to) {
  if constexpr (kAlongK) pack_panel_along_k<E, Dot, kR, kOffset>(rows, count, k, to);
  else pack_panel_across_k<E, Dot, kR, kOffset>(rows, count, k, to);
}

// sums[j] (+)= -128 * the sum of column j of a packed panel.
template <int kR>
TW_NOINLINE void add_column_sums(const uint32_t* panel, int64_t groups, int32_t* sums, bool first) {
  static_assert(kR % kLanes == 0, "panels of B are whole vectors");
  constexpr int kV = kR / kLanes;
  i32v even[kV] = {}, odd[kV] = {};  // two chains for each vector hide the instruction's latency
  const u32v ones = splat_bits(0x01010101u);
  int64_t g = 0;
  for (; g + 2 <= groups; g += 2)
    TW_UNROLL
    for (int v = 0; v < kV; v++) {
      even[v] = DotI8::step(even[v], ones, load_as<u32v>(panel + g * kR + v * kLanes));
      odd[v] = DotI8::step(odd[v], ones, load_as<u32v>(panel + (g + 1) * kR + v * kLanes));
    }
  TW_UNROLL
  for (int v = 0; v < kV; v++) {
    if (g < groups) even[v] = DotI8::step(even[v], ones, load_as<u32v>(panel + g * kR + v * kLanes));
    const i32v sum = (even[v] + odd[v]) * -128;
    store_as(sums + v * kLanes, first ? sum : load_as<i32v>(sums + v * kLanes) + sum);
  }
}

TW_NAMESPACE_END

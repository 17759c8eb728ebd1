// Packing: the panel format that the microkernel reads.
//
// An operand of `extent` rows (of A) or columns (of B) and depth k is packed as
//     [ceil(extent / R)] [ceil(k / depth)] [R] groups of 32 bits
// with R the register tile of that side (MR or NR) and group g of row r holding elements k = depth*g ... depth*g +
// depth-1 (see cpu/blocks/dot.hpp for `depth`). Rows and values of k that do not exist are zero. Every panel keeps its
// whole k together, so that any cache blocking can read it: the format depends on the element type, R and depth only.
// With DotI8 the values of A carry an offset of 128, and B is followed by the int32 array [ceil(extent / R) * R] of
// -128 times the sum of each column, which undoes it.
#pragma once
#include "tilewright/cpu/conv/groups.hpp"

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

// Takes 128 times what two chains have counted from the sums of L columns.
TW_INLINE void add_to_sums(int32_t* sums, i32v even, i32v odd) {
  store_as(sums, load_as<i32v>(sums) - ((even + odd) << 7));
}

// kWidth (1 to L) rows by L groups, all of them readable: transposed into L rows of kWidth groups, to_step apart.
// kSpill: to_step is kWidth, so that what a vector has beyond it may be overwritten by the next.
template <class E, class Dot, int kWidth, bool kOffset, bool kSpill>
TW_NOINLINE void pack_block(const char* from, int64_t line, uint32_t* to, int64_t to_step, int32_t* sums) {
  u32v block[kLanes];
  TW_UNROLL
  for (int i = 0; i < kLanes; i++) {
    block[i] = u32v{};
    if (i < kWidth) {
      block[i] = load_groups_along_k<E, Dot>(from + i * line);
      // Rows may lie on pages of their own, where the processor's prefetcher does not follow.
      __builtin_prefetch(from + i * line + 256, 0, 2);
    }
    if constexpr (kOffset) block[i] ^= 0x80808080u;
  }
  transpose(block);
  TW_UNROLL
  for (int g = 0; g < kLanes; g++) {
    if (kSpill && g * kWidth + kLanes <= kLanes * kWidth) store_as(to + g * to_step, block[g]);
    else __builtin_memcpy(to + g * to_step, &block[g], kWidth * 4);
  }
  if constexpr (Dot::offset_a && !kOffset) {
    i32v chains[2] = {};
    TW_UNROLL
    for (int g = 0; g < kLanes; g++) chains[g % 2] = Dot::step(chains[g % 2], splat_bits(0x01010101u), block[g]);
    add_to_sums(sums, chains[0], chains[1]);
  }
}

// The same at the edges, where only `rows` rows of `elements` elements exist: by way of a copy that has all of them.
template <class E, class Dot, int kWidth, bool kOffset, bool kSpill>
TW_NOINLINE void pack_edge_block(const char* from, int64_t line, int64_t rows, int64_t elements, uint32_t* to,
                                 int64_t to_step, int32_t* sums) {
  constexpr int kLine = kLanes * Dot::depth * size_of<E>;
  alignas(64) char copy[kWidth * kLine] = {};
  uint32_t packed[kLanes * kWidth];
  const int64_t bytes = min_of(elements * size_of<E>, kLine), groups = min_of(ceil_div(elements, Dot::depth), kLanes);
  for (int64_t i = 0; i < min_of(rows, kWidth); i++) __builtin_memcpy(copy + i * kLine, from + i * line, (size_t)bytes);
  pack_block<E, Dot, kWidth, kOffset, kSpill>(copy, kLine, packed, kWidth, sums);
  for (int64_t g = 0; g < groups; g++) __builtin_memcpy(to + g * to_step, packed + g * kWidth, kWidth * 4);
}

template <class E, class Dot, int kWidth, int kR, bool kOffset>
TW_INLINE void pack_columns(Rows<E, true> rows, int64_t first, int64_t count, int64_t k, uint32_t* to, int32_t* sums) {
  constexpr bool kSpill = kR < kLanes;
  const int64_t line = rows.ld * size_of<E>;
  for (int64_t k0 = 0; k0 < k; k0 += kLanes * Dot::depth, to += kLanes * kR) {
    if (count - first >= kWidth && k - k0 >= kLanes * Dot::depth)
      pack_block<E, Dot, kWidth, kOffset, kSpill>(rows.at(first, k0), line, to + first, kR, sums + first);
    else
      pack_edge_block<E, Dot, kWidth, kOffset, kSpill>(rows.at(first, k0), line, count - first, k - k0, to + first, kR,
                                                       sums + first);
  }
}

// Panels from rows whose k is contiguous: blocks of L rows and L groups are transposed in registers.
template <class E, class Dot, int kR, bool kOffset, int kPanels>
TW_INLINE void pack_rows(Rows<E, true> rows, int64_t count, int64_t k, uint32_t* to, int64_t panel, int32_t* sums) {
  static_assert(kPanels == 1, "one panel at a time");
  (void)panel;
  constexpr int kWhole = kR / kLanes * kLanes, kRest = kR % kLanes;
  for (int h = 0; h < kWhole; h += kLanes) pack_columns<E, Dot, kLanes, kR, kOffset>(rows, h, count, k, to, sums);
  if constexpr (kRest > 0) pack_columns<E, Dot, kRest, kR, kOffset>(rows, kWhole, count, k, to, sums);
}

// kPanels panels, `panel` groups apart, from lines of kPanels * kR contiguous rows each; a few elements more are read
// (see kRead), and, if kR is no multiple of L, as many groups more are written at the end of each panel.
template <class E, class Dot, int kR, bool kOffset, int kPanels>
TW_NOINLINE void pack_lines(const char* from, int64_t line, int64_t groups, uint32_t* to, int64_t panel,
                            int32_t* sums) {
  constexpr int kV = (kR + kLanes - 1) / kLanes, kAhead = 16;
  constexpr bool kSums = Dot::offset_a && !kOffset;
  i32v sum[kSums ? kPanels * kV : 1] = {};
  for (int64_t g = 0; g < groups; g++, from += Dot::depth * line, to += kR) {
    // Every line of the source may lie on a page of its own, where the processor's prefetcher does not follow: ask for
    // lines ahead ourselves.
    TW_UNROLL
    for (int d = 0; d < Dot::depth; d++)
      TW_UNROLL
      for (int byte = 0; byte < kPanels * kR * size_of<E>; byte += 64)
        __builtin_prefetch(from + (kAhead + d) * line + byte, 0, 3);
    TW_UNROLL
    for (int p = 0; p < kPanels; p++)
      TW_UNROLL
      for (int v = 0; v < kV; v++) {
        u32v x = load_groups_across_k<E, Dot>(from + (p * kR + v * kLanes) * size_of<E>, line);
        if constexpr (kOffset) x ^= 0x80808080u;
        if constexpr (kSums) sum[p * kV + v] = Dot::step(sum[p * kV + v], splat_bits(0x01010101u), x);
        store_as(to + p * panel + v * kLanes, x);
      }
  }
  if constexpr (kSums)
    TW_UNROLL
    for (int i = 0; i < kPanels * kV; i++) add_to_sums(sums + i * kLanes, sum[i], i32v{});
}

// Panels from rows that are contiguous themselves (k runs across): groups are interleaved from `depth` lines. What
// pack_lines may not read or write goes by way of copies that have all of it.
template <class E, class Dot, int kR, bool kOffset, int kPanels>
TW_INLINE void pack_rows(Rows<E, false> rows, int64_t count, int64_t k, uint32_t* to, int64_t panel, int32_t* sums) {
  constexpr int kRead = (kPanels - 1) * kR + (kR + kLanes - 1) / kLanes * kLanes, kGroups = 8;
  constexpr bool kSums = Dot::offset_a && !kOffset;
  const int64_t line = rows.ld * size_of<E>, groups = ceil_div(k, Dot::depth);
  constexpr int kBack = (kLanes - 1 - (kR + kLanes - 1) % kLanes + kR - 1) / kR;  // groups that a vector spills into
  int64_t g = count < kRead ? 0 : max_of(k / Dot::depth - kBack, 0);
  if (g > 0) pack_lines<E, Dot, kR, kOffset, kPanels>(rows.data, line, g, to, panel, sums);
  const int64_t panels = min_of(ceil_div(count, kR), kPanels);
  for (; g < groups; g += kGroups) {
    alignas(64) char copy[kGroups * Dot::depth * kRead * size_of<E>] = {};
    constexpr int kPanel = kGroups * kR + kLanes;
    uint32_t packed[kPanels * kPanel];
    int32_t added[kSums ? kPanels * kR : 1] = {};
    const int64_t now = min_of(groups - g, kGroups), lines = min_of(k - g * Dot::depth, now * Dot::depth);
    for (int64_t i = 0; i < lines; i++)
      __builtin_memcpy(copy + i * kRead * size_of<E>, rows.at(0, g * Dot::depth + i),
                       (size_t)min_of(count, kPanels * kR) * size_of<E>);
    pack_lines<E, Dot, kR, kOffset, kPanels>(copy, kRead * size_of<E>, now, packed, kPanel, added);
    for (int64_t p = 0; p < panels; p++) {
      __builtin_memcpy(to + p * panel + g * kR, packed + p * kPanel, (size_t)(now * kR) * 4);
      if constexpr (kSums)
        for (int64_t j = p * kR; j < (p + 1) * kR; j++) sums[j] += added[j];
    }
  }
}

TW_INLINE void clear_sums(int32_t* sums, int64_t count) {
  for (int64_t j = 0; j < count; j++) sums[j] = 0;
}

// Panels packed together: the contiguous elements of a few make one cache line, which is then read once.
template <class E, int kR, bool kAlongK>
constexpr int panels_together = kAlongK || kR * size_of<E> >= 64 ? 1 : 64 / (kR * size_of<E>);

// Packs up to kPanels panels of kR rows, `panel` groups apart (`count` rows exist, be they more or less), and k values
// into ceil(k / depth) * kR groups each. For B of DotI8, -128 times the sum of each column is added to `sums`.
template <class E, class Dot, int kR, bool kAlongK, bool kOffset, int kPanels = 1>
TW_NOINLINE void pack_panels(Rows<E, kAlongK> rows, int64_t count, int64_t k, uint32_t* to, int64_t panel,
                             int32_t* sums) {
  static_assert(!Dot::offset_a || kOffset || kR % kLanes == 0, "panels of B are whole vectors");
  pack_rows<E, Dot, kR, kOffset, kPanels>(rows, count, k, to, panel, sums);
}

TW_NAMESPACE_END

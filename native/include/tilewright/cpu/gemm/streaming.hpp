// Skinny products, where one operand has few rows (or columns) and the other is read once: they run at the speed of
// memory. The big operand, the side with the larger tile, is not packed; the small one is turned into groups (see
// cpu/blocks/dot.hpp) that stay in the first-level cache.
#pragma once
#include "tilewright/cpu/blocks/blocked.hpp"

TW_NAMESPACE_BEGIN

// Vectors that each hold kRows sums in parts of kLanes / kRows lanes: of two such vectors one with twice as many sums,
// in half as many lanes each. As `sum_lanes` adds: lane i and the one half a part behind it.
template <int kRows, class V, int... kI>
TW_INLINE V fold(V x, V y, Sequence<kI...>) {
  constexpr int kPart = kLanes / kRows, kHalf = kPart / 2;
  return __builtin_shufflevector(x, y, (kI / kHalf * kPart + kI % kHalf)...) +
         __builtin_shufflevector(x, y, (kI / kHalf * kPart + kHalf + kI % kHalf)...);
}

// Sums of the lanes of kCount vectors, a power of two, in their order, in the lanes of the first ones.
template <int kCount, int kRows = 1, class V>
TW_INLINE void sum_each(V* x) {
  constexpr auto all = MakeSequence<kLanes>::type{};
  if constexpr (kRows < kLanes) {
    if constexpr (kCount == 1) {
      x[0] = fold<kRows>(x[0], x[0], all);
      sum_each<1, 2 * kRows>(x);
    } else {
      TW_UNROLL
      for (int i = 0; i < kCount / 2; i++) x[i] = fold<kRows>(x[2 * i], x[2 * i + 1], all);
      sum_each<kCount / 2, 2 * kRows>(x);
    }
  }
}

// The last groups of rows whose k is no whole number of vectors: a whole vector that ends where they end, and of which
// `keep` drops what was counted before. Reading part of a vector takes many times as long.
struct Tail {
  int64_t from = -1;  // the first k of it; less than 0: there is none
  u32v keep;
  alignas(64) uint32_t groups[kSkinny * kLanes];  // of Y, a vector for each row
};

// Below, X is the big operand, given by rows, and Y the small one: results are out[c][r] = sum over k of Y(c, k) X(r,
// k).
template <class E, class Dot>
struct Streaming {
  using V = typename Dot::accumulator;
  using Accumulator = typename Dot::scalar;
  // Rows of Y whose sums are in registers at a time, with three vectors of each: 12 of 16 registers, or 24 of 32.
  static constexpr int kHeld = kLanes >= 16 ? 8 : 4;
  // Results of one row of Y along k that are stored at a time.
  static constexpr int kStored = 8;

  // Unsigned bytes stand first in DotI8, so it is X that gets the offset there, and Y whose sums undo it.
  TW_INLINE static u32v offset(u32v x) { return Dot::offset_a ? x ^ 0x80808080u : x; }

  // k contiguous in X: dot products of kX rows of X with kC rows of Y at a time. Where Y has more rows than there are
  // registers for, the same rows of X, which are in the nearest cache by then, are read again.
  template <int kY>
  static TW_NOINLINE void along_k(Rows<E, true> x, int64_t rows, int64_t k, const uint32_t* y, int64_t y_ld,
                                  const Tail& tail, const Accumulator* start, Accumulator* out) {
    constexpr int kC = kY < kHeld ? kY : kHeld, kX = kC == 1 ? kStored : 3;
    for (int64_t r = 0; r < rows; r += kX)
      for (int c = 0; c < kY; c += kC)
        dot_products<kX, kC>(x, r, rows, k, y + c * y_ld, y_ld, tail, tail.groups + c * kLanes, start + c,
                             out + c * kStreamColumns);
  }

  // Sums of the lanes of each of kCount vectors.
  template <int kCount>
  static TW_INLINE void store_sums(V* each, Accumulator* out) {
    sum_each<kCount>(each);
    TW_UNROLL
    for (int i = 0; i < kCount; i += kLanes) store_as(out + i, each[i / kLanes]);
  }

  template <int kX, int kC>
  static TW_INLINE void dot_products(Rows<E, true> x, int64_t r, int64_t rows, int64_t k, const uint32_t* y,
                                     int64_t y_ld, const Tail& tail, const uint32_t* y_tail, const Accumulator* start,
                                     Accumulator* out) {
    constexpr int kStep = kLanes * Dot::depth;
    V sums[kX][kC];
    const char* from[kX];
    TW_UNROLL
    for (int i = 0; i < kX; i++) {
      from[i] = x.at(min_of(r + i, rows - 1), 0);  // past the end: the last row again, its results are dropped
      TW_UNROLL
      for (int c = 0; c < kC; c++) sums[i][c] = V{};
    }
    int64_t k0 = 0;
    for (; k0 + kStep <= k; k0 += kStep) {
      u32v groups[kX];
      TW_UNROLL
      for (int i = 0; i < kX; i++) groups[i] = offset(load_groups_along_k<E, Dot>(from[i] + k0 * size_of<E>));
      TW_UNROLL
      for (int c = 0; c < kC; c++) {
        const u32v held = load_as<u32v>(y + c * y_ld + k0 / Dot::depth);
        TW_UNROLL
        for (int i = 0; i < kX; i++) sums[i][c] = Dot::step(sums[i][c], groups[i], held);
      }
    }
    if (tail.from >= 0) {
      u32v groups[kX];
      TW_UNROLL
      for (int i = 0; i < kX; i++)
        groups[i] = offset(load_groups_along_k<E, Dot>(from[i] + tail.from * size_of<E>)) & tail.keep;
      TW_UNROLL
      for (int c = 0; c < kC; c++)
        TW_UNROLL
        for (int i = 0; i < kX; i++) sums[i][c] = Dot::step(sums[i][c], groups[i], load_as<u32v>(y_tail + c * kLanes));
    } else if (k0 < k) {  // less than a vector in all
      TW_UNROLL
      for (int i = 0; i < kX; i++) {
        const u32v groups = offset(load_groups_along_k<E, Dot>(from[i], k));
        TW_UNROLL
        for (int c = 0; c < kC; c++) sums[i][c] = Dot::step(sums[i][c], groups, load_as<u32v>(y + c * y_ld));
      }
    }
    constexpr int kCount = kC == 1 ? kX : kC;
    alignas(64) Accumulator found[kCount < kLanes ? kLanes : kCount];
    V each[kCount];
    if constexpr (kC == 1) {
      TW_UNROLL
      for (int i = 0; i < kX; i++) each[i] = sums[i][0];
      store_sums<kX>(each, found);
      for (int i = 0; i < kX && r + i < rows; i++) out[r + i] = start[0] + found[i];
    } else {
      TW_UNROLL
      for (int i = 0; i < kX; i++) {
        TW_UNROLL
        for (int c = 0; c < kC; c++) each[c] = sums[i][c];
        store_sums<kC>(each, found);
        if (r + i >= rows) break;
        TW_UNROLL
        for (int c = 0; c < kC; c++) out[c * kStreamColumns + r + i] = start[c] + found[c];
      }
    }
  }

  // Rows of X contiguous along r, k across: a few lines of X are added into all results before the next lines are read.
  // Few: lines whose distance is a power of two compete for the same eight places of the nearest cache, and so do the
  // lines that were asked for ahead. For one row of Y, whose parts of lines are long, the lines come from as many parts
  // of k, so that each part is read from its beginning to its end: eight, or four where eight would be a multiple of a
  // page apart. Nothing is asked for ahead then: the processor sees what comes along a line by itself, and the nearest
  // cache has no room for the lines behind.
  template <int kY>
  static TW_NOINLINE void across_k(Rows<E, false> x, int64_t rows, int64_t k, const uint32_t* y, int64_t y_ld,
                                   const Accumulator* start, Accumulator* out) {
    constexpr int kMost = (int)max_of(8 / Dot::depth, 2), kFew = (int)max_of(4 / Dot::depth, 2);
    if constexpr (kY == 1 && kMost > kFew)
      if (k / Dot::depth / kMost * Dot::depth * x.ld * size_of<E> % 4096 != 0)
        return in_groups<kY, kMost>(x, rows, k, y, y_ld, start, out);
    in_groups<kY, kFew>(x, rows, k, y, y_ld, start, out);
  }

  template <int kY, int kGroups>
  TW_INLINE static void in_groups(Rows<E, false> x, int64_t rows, int64_t k, const uint32_t* y, int64_t y_ld,
                                  const Accumulator* start, Accumulator* out) {
    const int64_t whole_rows = rows / kLanes * kLanes, rounds = k / Dot::depth / kGroups;
    const int64_t done = rounds * kGroups * Dot::depth, line = x.ld * size_of<E>;
    // The last vector of results ends where the rows end, so that no part of a vector is read, and goes to its place at
    // last.
    const int64_t last = whole_rows < rows ? rows - kLanes : -1;
    for (int c = 0; c < kY; c++)
      for (int64_t r = 0; r < rows; r += kLanes) store_as(out + c * kStreamColumns + r, V{} + start[c]);
    if constexpr (kY == 1)
      for (int64_t g = 0; g < rounds; g++) {
        add_parts<kGroups>(x.at(0, g * Dot::depth), whole_rows, line, rounds, y + g, out);
        if (last >= 0) add_parts<kGroups>(x.at(last, g * Dot::depth), kLanes, line, rounds, y + g, out + whole_rows);
      }
    else
      for (int64_t g = 0; g < rounds * kGroups; g += kGroups) {
        add_rows<kGroups, kY>(x.at(0, g * Dot::depth), whole_rows, line, y + g, y_ld, out);
        if (last >= 0) add_rows<kGroups, kY>(x.at(last, g * Dot::depth), kLanes, line, y + g, y_ld, out + whole_rows);
      }
    if (last >= 0)
      for (int c = 0; c < kY; c++)
        for (int64_t r = whole_rows; r < rows; r++)
          out[c * kStreamColumns + r] = out[c * kStreamColumns + r + whole_rows - last];
    else if (whole_rows < rows) add_edge(x, whole_rows, rows, 0, done, y, y_ld, kY, out);
    add_edge(x, 0, rows, done, k, y, y_ld, kY, out);
  }

  // One group of lines of each of kGroups parts of k, `groups` long, added to `count` results.
  template <int kGroups>
  TW_INLINE static void add_parts(const char* x, int64_t count, int64_t line, int64_t groups, const uint32_t* y,
                                  Accumulator* out) {
    const char* from[kGroups];
    u32v held[kGroups];
    TW_UNROLL
    for (int l = 0; l < kGroups; l++) from[l] = x + l * groups * Dot::depth * line, held[l] = splat_bits(y[l * groups]);
    for (int64_t r = 0; r < count; r += kLanes) {
      V sum = load_as<V>(out + r);
      TW_UNROLL
      for (int l = 0; l < kGroups; l++)
        sum = Dot::step(sum, offset(load_groups_across_k<E, Dot>(from[l] + r * size_of<E>, line)), held[l]);
      store_as(out + r, sum);
    }
  }

  // kGroups groups of lines times kY rows of Y, added to `count` results of each.
  template <int kGroups, int kY>
  static TW_NOINLINE void add_rows(const char* from, int64_t count, int64_t line, const uint32_t* y, int64_t y_ld,
                                   Accumulator* out) {
    constexpr int kC = kY < kHeld ? kY : kHeld, kV = 3, kWide = kLanes * kV;
    int64_t r = 0;
    for (; r + kWide <= count; r += kWide)
      for (int c = 0; c < kY; c += kC)
        add_lines<kGroups, kC, kV>(from, r, line, y + c * y_ld, y_ld, out + c * kStreamColumns + r, c == 0);
    for (; r < count; r += kLanes)
      for (int c = 0; c < kY; c += kC)
        add_lines<kGroups, kC, 1>(from, r, line, y + c * y_ld, y_ld, out + c * kStreamColumns + r, c == 0);
  }

  // Vector r of group l of the lines at `from`. Asks for the lines of the next round, which may lie on other pages: the
  // processor does not guess them.
  template <int kGroups>
  TW_INLINE static u32v line_groups(const char* from, int64_t r, int l, int64_t line, bool ahead) {
    const char* const at = from + r * size_of<E> + l * Dot::depth * line;
    if (ahead && r * size_of<E> % 64 < kLanes * size_of<E>)
      TW_UNROLL
      for (int d = 0; d < Dot::depth; d++) __builtin_prefetch(at + (kGroups * Dot::depth + d) * line, 0, 3);
    return offset(load_groups_across_k<E, Dot>(at, line));
  }

  // kGroups groups of lines times kC rows of Y, added to kV vectors of the results of each.
  template <int kGroups, int kC, int kV>
  TW_INLINE static void add_lines(const char* from, int64_t r, int64_t line, const uint32_t* y, int64_t y_ld,
                                  Accumulator* out, bool ahead) {
    V sums[kC][kV];
    TW_UNROLL
    for (int c = 0; c < kC; c++)
      TW_UNROLL
      for (int v = 0; v < kV; v++) sums[c][v] = load_as<V>(out + c * kStreamColumns + v * kLanes);
    TW_UNROLL
    for (int l = 0; l < kGroups; l++) {
      u32v groups[kV];
      TW_UNROLL
      for (int v = 0; v < kV; v++) groups[v] = line_groups<kGroups>(from, r + v * kLanes, l, line, ahead);
      TW_UNROLL
      for (int c = 0; c < kC; c++) {
        const u32v held = splat_bits(y[c * y_ld + l]);
        TW_UNROLL
        for (int v = 0; v < kV; v++) sums[c][v] = Dot::step(sums[c][v], groups[v], held);
      }
    }
    TW_UNROLL
    for (int c = 0; c < kC; c++)
      TW_UNROLL
      for (int v = 0; v < kV; v++) store_as(out + c * kStreamColumns + v * kLanes, sums[c][v]);
  }

  // The remainder of across_k: rows [r0, r1) times k in [k0, k1), k0 at the start of a group.
  static TW_NOINLINE void add_edge(Rows<E, false> x, int64_t r0, int64_t r1, int64_t k0, int64_t k1, const uint32_t* y,
                                   int64_t y_ld, int y_count, Accumulator* out) {
    for (int64_t k = k0; k < k1; k += Dot::depth)
      for (int64_t r = r0; r < r1; r += kLanes) {
        const u32v groups = offset(load_groups_across_k<E, Dot>(x.at(r, k), x.ld * size_of<E>, k1 - k, r1 - r));
        for (int c = 0; c < y_count; c++) {
          Accumulator* const to = out + c * kStreamColumns + r;
          store_as(to, Dot::step(load_as<V>(to), groups, splat_bits(y[c * y_ld + k / Dot::depth])));
        }
      }
  }

  template <bool kAlongK>
  static void multiply(Rows<E, kAlongK> x, int64_t rows, int64_t k, const uint32_t* y, int64_t y_ld, const Tail& tail,
                       int64_t y_count, const Accumulator* start, Accumulator* out) {
    if constexpr (kAlongK) {
      if (y_count == 1) along_k<1>(x, rows, k, y, y_ld, tail, start, out);
      else if (y_count <= 4) along_k<4>(x, rows, k, y, y_ld, tail, start, out);
      else along_k<8>(x, rows, k, y, y_ld, tail, start, out);
    } else {
      if (y_count == 1) across_k<1>(x, rows, k, y, y_ld, start, out);
      else if (y_count <= 4) across_k<4>(x, rows, k, y, y_ld, start, out);
      else across_k<8>(x, rows, k, y, y_ld, start, out);
    }
  }

  // The tail of rows of Y of length k, where X lies along k.
  template <bool kAlongK>
  static TW_NOINLINE void prepare_tail(Rows<E, kAlongK> y, int64_t count, int64_t k, Tail& tail) {
    constexpr int64_t kStep = kLanes * Dot::depth;
    tail.from = -1;
    if (k < kStep || k % kStep == 0) return;
    tail.from = k - kStep;
    Accumulator unused[kSkinny];
    prepare(Rows<E, kAlongK>{y.at(0, tail.from), y.ld}, count, kStep, tail.groups, kLanes, unused);
    alignas(64) uint8_t keep[kVectorBytes];
    for (int64_t i = 0; i < kVectorBytes; i++) keep[i] = i * Dot::depth / 4 < kStep - k % kStep ? 0 : 0xff;
    tail.keep = load_as<u32v>((const char*)keep);
    for (int64_t g = 0; g < kSkinny * kLanes; g += kLanes)
      store_as(tail.groups + g, load_as<u32v>(tail.groups + g) & tail.keep);
  }

  // Rows of Y as groups, `ld` apart, zeros to the end of the last vector and in rows that do not exist. start[c]: what
  // row c's sums begin with.
  template <bool kAlongK>
  static TW_NOINLINE void prepare(Rows<E, kAlongK> y, int64_t count, int64_t k, uint32_t* to, int64_t ld,
                                  Accumulator* start) {
    const int64_t read = count == 1 ? 1 : count <= 4 ? 4 : kSkinny;  // rows that `multiply` looks at
    for (int64_t c = 0; c < read; c++) {
      for (int64_t g = 0; g < ld; g += kLanes) store_as(to + c * ld + g, u32v{});
      start[c] = 0;
    }
    if constexpr (kAlongK) {
      for (int64_t c = 0; c < count; c++)
        for (int64_t g = 0; g * Dot::depth < k; g += kLanes)
          store_as(to + c * ld + g, load_groups_along_k<E, Dot>(y.at(c, g * Dot::depth), k - g * Dot::depth));
    } else {
      for (int64_t g = 0; g * Dot::depth < k; g++)
        for (int64_t c = 0; c < count; c += kLanes) {
          uint32_t lanes[kLanes];
          store_as(lanes, load_groups_across_k<E, Dot>(y.at(c, g * Dot::depth), y.ld * size_of<E>, k - g * Dot::depth,
                                                       count - c));
          for (int64_t i = 0; i < kLanes && c + i < count; i++) to[(c + i) * ld + g] = lanes[i];
        }
    }
    if constexpr (Dot::offset_a)
      for (int64_t c = 0; c < count; c++) {
        i32v sum = {};
        for (int64_t g = 0; g < ld; g += kLanes)
          sum = Dot::step(sum, splat_bits(0x01010101u), load_as<u32v>(to + c * ld + g));
        start[c] = -128 * sum_lanes(sum);
      }
  }
};

template <class Config>
struct StreamingGemm {
  using Plan = Blocking<Config>;
  using Dot = typename Plan::Dot;
  using Out = typename Plan::Out;
  using Accumulator = typename Dot::scalar;
  using A = Rows<typename Config::A, !Config::a_col>;
  using B = Rows<typename Config::B, Config::b_col>;

  const Product& product;
  Crew& crew;
  char* scratch;

  void run(Range rows, Range columns) {
    const A a = {A{product.a, product.lda}.at(0, product.k0), product.lda};
    const B b = {B{product.b, product.ldb}.at(0, product.k0), product.ldb};
    if constexpr (Plan::streams_b) stream<true, typename Config::B, typename Config::A>(b, columns, a, rows);
    else stream<false, typename Config::A, typename Config::B>(a, rows, b, columns);
  }

 private:
  template <bool kBigIsB, class XE, class YE, class X, class Y>
  TW_INLINE void stream(X x, Range big, Y y, Range small) {
    const int64_t k = product.k1 - product.k0, y_ld = round_up(ceil_div(k, Dot::depth), 16);
    uint32_t* const groups = (uint32_t*)scratch;
    Accumulator* const results = (Accumulator*)(groups + kSkinny * y_ld);
    // One row takes the room of all: the longer a part of a line, the faster it comes. Along k lines are whole anyway,
    // and smaller chunks let the faster member do more.
    const bool alone = small.size() == 1;
    const int64_t widest = alone ? kSkinny * kStreamColumns : kStreamColumns;
    const bool along_k = kBigIsB ? Config::b_col : !Config::a_col;
    const int64_t each = alone && !along_k ? crew.size : 2 * crew.size;
    const int64_t wanted = crew.size == 1 ? widest : round_up(ceil_div(big.size(), each), 64);
    const int64_t chunk = min_of(widest, wanted), chunks = big.size() > 0 ? ceil_div(big.size(), chunk) : 0;
    for (int64_t y0 = small.begin; y0 < small.end; y0 += kSkinny) {
      const int64_t count = min_of(small.end - y0, kSkinny);
      Accumulator start[kSkinny];
      Tail tail;
      Streaming<YE, Dot>::prepare(Y{y.at(y0, 0), y.ld}, count, k, groups, y_ld, start);
      if (along_k) Streaming<YE, Dot>::prepare_tail(Y{y.at(y0, 0), y.ld}, count, k, tail);
      for (int64_t piece; (piece = crew.claim(chunks)) >= 0;) {
        const int64_t x0 = big.begin + piece * chunk, rows = min_of(big.end - x0, chunk);
        Streaming<XE, Dot>::multiply(X{x.at(x0, 0), x.ld}, rows, k, groups, y_ld, tail, count, start, results);
        if constexpr (kBigIsB) Out::store(product.out, y0, x0, count, rows, results, kStreamColumns, nullptr);
        else store_transposed(x0, y0, rows, count, results);
      }
      crew.end_stage(chunks);
    }
  }

  // results[c][r] belongs to element (i0 + r, j0 + c).
  TW_NOINLINE void store_transposed(int64_t i0, int64_t j0, int64_t rows, int64_t cols,
                                    const Accumulator* results) const {
    constexpr int kRows = 32, kLd = 16;
    alignas(64) Accumulator tile[kRows * kLd] = {};
    for (int64_t r = 0; r < rows; r += kRows) {
      const int64_t height = min_of(rows - r, kRows);
      for (int64_t c = 0; c < cols; c++)
        for (int64_t i = 0; i < height; i++) tile[i * kLd + c] = results[c * kStreamColumns + r + i];
      Out::store(product.out, i0 + r, j0, height, cols, tile, kLd, nullptr);
    }
  }
};

TW_NAMESPACE_END

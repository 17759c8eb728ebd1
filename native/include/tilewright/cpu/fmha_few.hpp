// The products of attention for a few rows (decoding): keys and values are read once, where they lie. Packing them would
// take longer than fetching them from memory.
//
// S: some keys and some rows at a time, each pair with a vector of partial sums along the head dimension. O: as the
// register tiles do it, with values straight from their rows. Rows ahead are asked for by hand: what the processor
// fetches on its own account ends with every page, and the products keep it from looking far ahead.
#pragma once
#include "tilewright/cpu/fmha_paged.hpp"

TW_NAMESPACE_BEGIN

// Of a, b (vectors of partial sums in runs of kRun lanes each): half as many runs, a's sums in the lower lanes of each
// pair of runs, b's in the upper ones.
template <int kRun, int... kI>
TW_INLINE f32v fold_pair(f32v a, f32v b, Sequence<kI...>) {
  const f32v low = __builtin_shufflevector(a, b, (kI % (2 * kRun) < kRun ? kI : kI - kRun + kLanes)...);
  const f32v high = __builtin_shufflevector(a, b, (kI % (2 * kRun) < kRun ? kI + kRun : kI + kLanes)...);
  return low + high;
}
template <int kRun>
TW_INLINE void fold_all(f32v* x) {
  TW_UNROLL
  for (int i = 0; i < kRun; i++) x[i] = fold_pair<kRun>(x[i], x[i + kRun], MakeSequence<kLanes>::type{});
  if constexpr (kRun > 1) fold_all<kRun / 2>(x);
}
// Lane i: the sum of the lanes of x[i], L vectors in all. Changes x.
TW_INLINE f32v fold(f32v* x) {
  fold_all<kLanes / 2>(x);
  return x[0];
}

template <class Config>
struct FmhaFew {
  using B = FmhaBlocking<Config>;
  using Dot = typename B::Dot;
  using K = typename Config::K;
  using V = typename Config::V;
  using Keys = FmhaSource<Config, K, false>;
  using Values = FmhaSource<Config, V, true>;
  static constexpr int most = (int)min_of(B::m0 / 4 * 4, 16);  // rows of an item
  static constexpr int together = kLanes / 4;                  // rows of a tile, unless there is one
  static constexpr int q_words = (B::q_words + kLanes - 1) / kLanes * kLanes;

  // Whether these operands can be read where they lie.
  static TW_INLINE bool fits(const tw_fmha_args& args, int64_t count) {
    if (Keys::vectorized || count > most || args.k.col != 1 || args.v.col != 1) return false;
    return !Config::paged || Keys::page_size(args) >= 4;
  }

  // Queries as groups, each row a whole number of vectors, zeros behind and below.
  static TW_INLINE void queries(const uint32_t* from, int64_t count, int64_t words, uint32_t* to) {
    __builtin_memset(to, 0, sizeof(uint32_t) * (size_t)most * q_words);
    for (int64_t r = 0; r < count; r++)
      __builtin_memcpy(to + r * q_words, from + r * B::q_words, (size_t)words * 4);
  }

  static TW_INLINE void scores(const Keys& source, int64_t first, int64_t count, int64_t of_rows,
                               const uint32_t* q, float* s) {
    if constexpr (together > 1)
      if (of_rows > 1) return scores_of<together>(source, first, count, of_rows, q, s);
    scores_of<1>(source, first, count, of_rows, q, s);
  }

  template <int kRows>
  static TW_NOINLINE void scores_of(const Keys& source, int64_t first, int64_t count, int64_t of_rows,
                                    const uint32_t* q, float* s) {
    constexpr int keys = kLanes / kRows;
    for (int64_t j = 0; j < count;) {
      const FmhaRun run = source.run(first + j);
      const int64_t here = min_of(run.count, count - j);
      for (int64_t i = 0; run.at && i < here; i += keys)
        tile<kRows>(run, i, min_of(here - i, keys), source.hdim, of_rows, q, s + j + i);
      j += here;
    }
  }

  // Asks for a line of `bytes` bytes at `at` to come nearer.
  template <int kBytes>
  static TW_INLINE void ask_for(const char* at) {
    TW_UNROLL
    for (int byte = 0; byte < kBytes; byte += 64) __builtin_prefetch(at + byte, 0, 3);
  }

  // kRows rows times L / kRows keys: a vector of sums for each pair.
  template <int kRows>
  static TW_INLINE void tile(const FmhaRun& run, int64_t i, int64_t count, int64_t hdim, int64_t of_rows,
                             const uint32_t* q, float* s) {
    constexpr int kStep = kLanes * Dot::depth, kAhead = 16, keys = kLanes / kRows;
    const char *at[keys], *ends[keys];
    alignas(64) char copy[keys][kStep * size_of<K>];
    const int64_t whole = hdim / kStep * kStep, left = hdim - whole;
    TW_UNROLL
    for (int n = 0; n < keys; n++) {
      at[n] = run.at + (i + (n < count ? n : 0)) * run.row * size_of<K>;
      ask_for<Config::hdim_q * size_of<K>>(at[n] + kAhead * run.row * size_of<K>);
      ends[n] = copy[n];
      if (left > 0) {  // the last elements of a row, with zeros behind them
        __builtin_memset(copy[n], 0, sizeof copy[n]);
        __builtin_memcpy(copy[n], at[n] + whole * size_of<K>, (size_t)left * size_of<K>);
      }
    }
    for (int64_t r = 0; r < of_rows; r += kRows) {
      f32v c[kLanes];
      TW_UNROLL
      for (int k = 0; k < kLanes; k++) c[k] = f32v{};
      const uint32_t* words = q + r * q_words;
      for (int64_t e = 0; e < whole; e += kStep, words += kLanes) step<kRows>(c, words, at, e * size_of<K>);
      if (left > 0) step<kRows>(c, words, ends, 0);
      const f32v sums = fold(c);
      // Lane k * keys + n: row k, key n.
      struct Line {
        float x[keys];
      } lines[kRows];
      static_assert(sizeof lines == sizeof sums, "one lane for each pair");
      store_as(&lines, sums);
      TW_UNROLL
      for (int k = 0; k < kRows; k++) {
        float* const to = s + (r + k) * B::s_words;
        if (count == keys) store_as(to, lines[k]);
        else __builtin_memcpy(to, &lines[k], (size_t)count * 4);
      }
    }
  }

  template <int kRows>
  static TW_INLINE void step(f32v* c, const uint32_t* words, const char* const* at, int64_t byte) {
    constexpr int keys = kLanes / kRows;
    u32v x[keys];
    TW_UNROLL
    for (int n = 0; n < keys; n++) x[n] = load_groups_along_k<K, Dot>(at[n] + byte);
    TW_UNROLL
    for (int k = 0; k < kRows; k++) {
      const u32v of_row = load_as<u32v>(words + k * q_words);
      TW_UNROLL
      for (int n = 0; n < keys; n++) c[k * keys + n] = Dot::step(c[k * keys + n], of_row, x[n]);
    }
  }

  // O = O * rescale + P V.
  static TW_NOINLINE void add_values(const Values& source, int64_t first, int64_t count, int64_t of_rows,
                                     const uint32_t* p, float* o, const float* rescale) {
    for (int64_t r = 0; r < of_rows; r++)
      for (int64_t c = 0; c < B::hdim_v; c += kLanes)
        store_as(o + r * B::hdim_v + c, load_as<f32v>(o + r * B::hdim_v + c) * rescale[r]);
    for (int64_t j = 0; j < count;) {
      const FmhaRun run = source.run(first + j);
      const int64_t here = min_of(run.count, count - j);
      for (int64_t i = 0; run.at && i < here; i += kChunk)
        chunk(run.at + i * run.row * size_of<V>, run.row * size_of<V>, min_of(here - i, kChunk), source.hdim, of_rows,
              p + (j + i) / Dot::depth, o);
      j += here;
    }
  }

  static constexpr int kChunk = 32;  // keys that stay in the first-level cache while all rows use them
  static TW_INLINE void chunk(const char* at, int64_t line, int64_t count, int64_t hdim, int64_t of_rows,
                              const uint32_t* p, float* o) {
    int64_t r = 0;
    if constexpr (together > 1)
      for (; of_rows > 1 && r < of_rows; r += together)
        lines<together, 4>(at, line, count, hdim, p + r * B::s_words, o + r * B::hdim_v);
    for (; r < of_rows; r++) lines<1, 8>(at, line, count, hdim, p + r * B::s_words, o + r * B::hdim_v);
  }

  template <int kRows, int kColumns>
  static TW_NOINLINE void lines(const char* at, int64_t line, int64_t count, int64_t hdim, const uint32_t* p, float* o) {
    int64_t c = 0;
    for (; c + kColumns * kLanes <= hdim; c += kColumns * kLanes)
      value_tile<kRows, kColumns>(at + c * size_of<V>, line, count, kColumns * kLanes, p, o + c);
    for (; c < hdim; c += kLanes)
      value_tile<kRows, 1>(at + c * size_of<V>, line, count, min_of(hdim - c, kLanes), p, o + c);
  }

  template <int kRows, int kColumns>
  static TW_INLINE void value_tile(const char* at, int64_t line, int64_t count, int64_t width, const uint32_t* p,
                                   float* o) {
    f32v c[kRows][kColumns];
    TW_UNROLL
    for (int r = 0; r < kRows; r++)
      TW_UNROLL
      for (int v = 0; v < kColumns; v++) c[r][v] = load_as<f32v>(o + r * B::hdim_v + v * kLanes);
    const auto multiply = [&c, &p](const u32v* x) {
      TW_UNROLL
      for (int r = 0; r < kRows; r++) {
        const u32v spread = splat_bits(load_as<uint32_t>(p + r * B::s_words));
        TW_UNROLL
        for (int v = 0; v < kColumns; v++) c[r][v] = Dot::step(c[r][v], spread, x[v]);
      }
    };
    int64_t j = 0;
    const bool whole = width == kColumns * kLanes;
    for (; whole && j + Dot::depth <= count; j += Dot::depth, at += Dot::depth * line, p++) {
      TW_UNROLL
      for (int d = 0; d < Dot::depth; d++)
        ask_for<kColumns * kLanes * size_of<V>>(at + (kChunk + d) * line);
      u32v x[kColumns];
      TW_UNROLL
      for (int v = 0; v < kColumns; v++) x[v] = load_groups_across_k<V, Dot>(at + v * kLanes * size_of<V>, line);
      multiply(x);
    }
    for (; j < count; j += Dot::depth, at += Dot::depth * line, p++) {
      u32v x[kColumns];
      for (int v = 0; v < kColumns; v++)
        x[v] = load_groups_across_k<V, Dot>(at + v * kLanes * size_of<V>, line, count - j, width - v * kLanes);
      multiply(x);
    }
    TW_UNROLL
    for (int r = 0; r < kRows; r++)
      TW_UNROLL
      for (int v = 0; v < kColumns; v++) store_as(o + r * B::hdim_v + v * kLanes, c[r][v]);
  }
};

TW_NAMESPACE_END

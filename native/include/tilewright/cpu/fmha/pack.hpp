// Packing of an item's operands: queries row by row, a block of keys and of values as panels of cpu/blocks/pack.hpp.
#pragma once
#include "tilewright/cpu/fmha/paged.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct FmhaPack {
  using B = FmhaBlocking<Config>;
  using Dot = typename B::Dot;
  using Q = typename Config::Q;
  using K = typename Config::K;
  using V = typename Config::V;
  using Keys = FmhaSource<Config, K, false>;
  using Values = FmhaSource<Config, V, true>;

  // One query as groups. kind: 1 as it is, -1 negated, 0 as zeros.
  static TW_NOINLINE void query(const char* from, int64_t col, int64_t hdim, int kind, uint32_t* to) {
    alignas(64) char line[round_up(Config::hdim_q, 16) * size_of<Q>];
    if (col != 1) {
      for (int64_t c = 0; c < hdim; c++)
        __builtin_memcpy(line + c * size_of<Q>, from + c * col * size_of<Q>, size_of<Q>);
      from = line;
    }
    const uint32_t sign = kind < 0 ? (B::pairs ? 0x80008000u : 0x80000000u) : 0, keep = kind ? ~0u : 0u;
    const int64_t words = ceil_div(hdim, Dot::depth);
    for (int64_t w = 0; w < words; w += kLanes) {
      const u32v x =
          (load_groups_along_k<Q, Dot>(from + w * Dot::depth * size_of<Q>, hdim - w * Dot::depth) ^ sign) & keep;
      __builtin_memcpy(to + w, &x, (size_t)min_of(words - w, kLanes) * 4);
    }
  }

  // Keys [first, first + count) as B of Q K^T: panels of nr columns.
  static TW_NOINLINE void keys(const Keys& source, int64_t first, int64_t count, uint32_t* to, char* gathered) {
    const int64_t words = ceil_div(source.hdim, Dot::depth);
    for (int64_t j = 0; j < count; j += B::nr, to += B::nr * words) {
      const int64_t rows = min_of(count - j, B::nr);
      FmhaRun run = source.run(first + j);
      if (Keys::vectorized || !run.at || run.col != 1 || run.count < rows) {
        constexpr int64_t line = Config::hdim_q;
        source.gather(first + j, rows, gathered, line * size_of<K>);
        run = {gathered, line, 1, rows};
      }
      pack_panels<K, Dot, B::nr, true, false>(Rows<K, true>{run.at, run.row}, rows, source.hdim, to, 0, nullptr);
    }
  }

  // Values [first, first + count) as B of P V: panels of nr columns, the last of them narrower.
  static TW_NOINLINE void values(const Values& source, int64_t first, int64_t count, uint32_t* to, char* gathered) {
    const int64_t words = ceil_div(count, Dot::depth);
    for (int64_t j = 0; j < count;) {
      FmhaRun run = source.run(first + j);
      int64_t rows = min_of(run.count, count - j);
      const bool lines = run.col == 1 || (Config::v_col && !Config::paged && run.row == 1);
      const bool in_place =
          run.at && !Values::vectorized && lines && (rows == count - j || rows % Dot::depth == 0);
      if (!in_place) {  // several pages together, up to the end
        constexpr int64_t line = Config::hdim_v;
        rows = count - j;
        source.gather(first + j, rows, gathered, line * size_of<V>);
        run = {gathered, line, 1, rows};
      }
      panels(run, source.hdim, rows, to + j / Dot::depth * B::nr, to + j / Dot::depth * B::last_nr, words);
      j += rows;
    }
  }

  // to, to_last: where these rows begin in the first panel, and in the last one counted from its own beginning less
  // what lies before it.
  static TW_INLINE void panels(const FmhaRun& run, int64_t hdim, int64_t rows, uint32_t* to, uint32_t* to_last,
                               int64_t words) {
    int64_t c = 0;
    for (; c < hdim && c + B::nr <= B::hdim_v; c += B::nr, to += B::nr * words, to_last += B::nr * words)
      panel<B::nr>(run, c, hdim, rows, to);
    if constexpr (B::last_nr != B::nr)
      if (c < hdim) panel<B::last_nr>(run, c, hdim, rows, to_last);
  }

  template <int kNR>
  static TW_INLINE void panel(const FmhaRun& run, int64_t c, int64_t hdim, int64_t rows, uint32_t* to) {
    const char* const at = run.at + c * run.col * size_of<V>;
    if (run.col == 1)
      pack_panels<V, Dot, kNR, false, false>(Rows<V, false>{at, run.row}, hdim - c, rows, to, 0, nullptr);
    else if constexpr (Config::v_col)
      pack_panels<V, Dot, kNR, true, false>(Rows<V, true>{at, run.col}, hdim - c, rows, to, 0, nullptr);
  }
};

TW_NAMESPACE_END

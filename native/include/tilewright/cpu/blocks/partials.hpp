// The second stage of split-K: slices are added in their order, then finished by the epilogue.
#pragma once
#include "tilewright/cpu/blocks/epilogue.hpp"

TW_NAMESPACE_BEGIN

constexpr int kReduceRows = 8, kReduceColumns = 128;

// Rows [row, row + rows) of one item, whose slices lie one after the other as [slice][m][n].
template <class Out>
TW_INLINE void reduce_rows(const typename Out::Output& out, const typename Out::Accumulator* partials, int64_t slices,
                           int64_t row, int64_t rows) {
  using V = typename Out::V;
  alignas(64) typename Out::Accumulator tile[kReduceRows * kReduceColumns];
  const int64_t m = out.problem->m, n = out.problem->n;
  for (int64_t j0 = 0; j0 < n; j0 += kReduceColumns) {
    const int64_t cols = min_of(n - j0, kReduceColumns);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < cols; j += kLanes) {
        V sum = {};
        for (int64_t s = 0; s < slices; s++)
          sum += load_lanes<V>(partials + (s * m + row + i) * n + j0 + j, cols - j);
        store_as(tile + i * kReduceColumns + j, sum);
      }
    Out::store(out, row, j0, rows, cols, tile, kReduceColumns, nullptr);
  }
}

TW_NAMESPACE_END

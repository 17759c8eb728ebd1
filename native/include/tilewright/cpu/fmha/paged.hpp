// Where rows of keys and values lie: in a tensor, or in pages of a cache, linear or vectorised.
#pragma once
#include "tilewright/cpu/fmha/block.hpp"

TW_NAMESPACE_BEGIN

// Rows of one tensor that are at one distance from each other: `count` of them from `at`; null: the page is absent.
struct FmhaRun {
  const char* at;
  int64_t row, col, count;
};

// Keys (or values) of one key head of item b.
template <class Config, class E, bool kValues>
struct FmhaSource {
  static constexpr bool vectorized = Config::paged && Config::kv_layout == KvLayout::vectorized;
  static constexpr int x = 16 / size_of<E>;  // values side by side

  const tw_fmha_args& args;
  const tw_fmha_tensor& tensor;
  const FmhaItem& item;
  int64_t b, head, hdim;

  static TW_INLINE int64_t page_size(const tw_fmha_args& args) {
    return Config::page_size > 0 ? Config::page_size : args.page_size;
  }

  // The rows from j on. Of a vectorised cache only `count` and whether there is a page.
  TW_INLINE FmhaRun run(int64_t j) const {
    FmhaRun run = {(const char*)tensor.ptr, tensor.row, tensor.col, item.k_rows - j};
    int64_t at = head * tensor.head;
    if constexpr (Config::paged) {
      const int64_t size = page_size(args), page = fmha_page<Config>(args, b, j), place = j & (size - 1);
      run.count = size - place;
      if (page < 0) run.at = nullptr;
      at += page * tensor.batch + (vectorized ? 0 : place * tensor.row);
    } else {
      at += (Config::varlen ? 0 : item.cache * tensor.batch) + (item.k_first + j) * tensor.row;
    }
    if (run.at) run.at += at * size_of<E>;
    return run;
  }

  // Copies rows [j, j + count) to `to`, `line` bytes apart; rows of absent pages become zero.
  TW_NOINLINE void gather(int64_t j, int64_t count, char* to, int64_t line) const {
    constexpr int size = size_of<E>;
    for (const int64_t end = j + count; j < end;) {
      const FmhaRun from = run(j);
      const int64_t rows = min_of(from.count, end - j);
      for (int64_t r = 0; r < rows; r++, to += line) {
        if (!from.at) {
          __builtin_memset(to, 0, (size_t)(hdim * size));
        } else if constexpr (vectorized && !kValues) {
          const int64_t place = (j + r) & (page_size(args) - 1);
          const char* const at = from.at + place * tensor.row * size;
          for (int64_t c = 0; c < hdim; c += x)
            __builtin_memcpy(to + c * size, at + c / x * tensor.chunk * size, (size_t)(min_of(hdim - c, x) * size));
        } else if constexpr (vectorized) {
          const int64_t place = (j + r) & (page_size(args) - 1);
          const char* const at = from.at + (place / x * tensor.chunk + place % x) * size;
          for (int64_t c = 0; c < hdim; c++) __builtin_memcpy(to + c * size, at + c * tensor.col * size, size);
        } else if (from.col == 1) {
          __builtin_memcpy(to, from.at + r * from.row * size, (size_t)(hdim * size));
        } else {
          for (int64_t c = 0; c < hdim; c++)
            __builtin_memcpy(to + c * size, from.at + (r * from.row + c * from.col) * size, size);
        }
      }
      j += rows;
    }
  }

  // absent[j]: whether the cache lacks the page of row first + j. Returns whether it lacks any.
  TW_NOINLINE bool find_absent(int64_t first, int64_t count, uint8_t* absent) const {
    bool any = false;
    for (int64_t j = 0; j < count;) {
      const FmhaRun from = run(first + j);
      const int64_t rows = min_of(from.count, count - j);
      __builtin_memset(absent + j, from.at ? 0 : 1, (size_t)rows);
      any = any || !from.at;
      j += rows;
    }
    return any;
  }
};

TW_NAMESPACE_END

// The one place that knows where a sequence of an attention begins, how long it is, which item and which page of a cache
// it uses, and which columns a row sees. For every device: no vectors, no library, no device header.
//
// Lengths, starts and page numbers are data that a caller may have wrong: lengths are cut to the room that there is, an
// absent page holds nothing, and the bits of kFmhaBad... say what was found. Nothing outside the tensors is ever read.
#pragma once
#include "tilewright/core/args/fmha.h"
#include "tilewright/core/options.hpp"

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define TW_EVERYWHERE __device__ __forceinline__
#elif defined(__HIP__)
#define TW_EVERYWHERE __attribute__((device)) inline __attribute__((always_inline))
#else
#define TW_EVERYWHERE inline __attribute__((always_inline))
#endif

namespace tw {

// Bits of word 0 of tw_fmha_args::status.
enum : int32_t {
  kFmhaBadLength = 1,    // a length is negative or beyond its room
  kFmhaBadPage = 2,      // a page number is outside the cache
  kFmhaBadStarts = 4,    // cu_seqlens or page_starts do not ascend within their tensor
  kFmhaCacheFull = 8,    // an append goes beyond the capacity
  kFmhaBadPosition = 16,  // a position is beyond the rotary tables
  kFmhaBadItem = 32,     // cache_index is out of range
};

struct FmhaItem {
  int64_t q_first, q_rows;  // rows of this item; q_first is 0 unless varlen
  int64_t k_first, k_rows;
  int64_t k_room;   // rows that k_rows may grow to: what a cache has room for
  int64_t off;      // column of row 0's diagonal: k_rows - q_rows if bottom_right, else 0
  int64_t cache;    // the batch item of k and v (not used where they are paged or varlen)
  bool skip;        // too few queries: nothing is computed, its rows are o = 0, lse = -inf
  int32_t bad;      // kFmhaBad... bits
  int32_t culprit;  // the length or start that set them
};

TW_EVERYWHERE int64_t fmha_min(int64_t a, int64_t b) { return a < b ? a : b; }
TW_EVERYWHERE int64_t fmha_max(int64_t a, int64_t b) { return a > b ? a : b; }

TW_EVERYWHERE int64_t fmha_checked(FmhaItem& item, int64_t value, int64_t most, int32_t bit) {
  if (value >= 0 && value <= most) return value;
  item.bad |= bit, item.culprit = (int32_t)value;
  return value < 0 ? 0 : most;
}

// One sequence of several that follow each other: where it begins, and its room.
TW_EVERYWHERE void fmha_starts(FmhaItem& item, const int32_t* starts, int64_t b, int64_t total, int64_t& first,
                               int64_t& room) {
  first = fmha_checked(item, starts[b], total, kFmhaBadStarts);
  const int64_t end = fmha_checked(item, starts[b + 1], total, kFmhaBadStarts);
  if (end < first) item.bad |= kFmhaBadStarts, item.culprit = (int32_t)end;
  room = end < first ? 0 : end - first;
}

// Item b. Of an append, q rows are the new ones and k_rows is the length before.
template <class Config>
TW_EVERYWHERE FmhaItem fmha_item(const tw_fmha_args& args, int64_t b) {
  constexpr bool kAppend = Config::family == FmhaFamily::append;
  constexpr bool kQueries = Config::family == FmhaFamily::dot_do_o || Config::family == FmhaFamily::convert_dq ||
                            Config::family == FmhaFamily::combine;  // these look at no keys
  FmhaItem item = {};
  item.cache = b;
  int64_t room = kAppend ? args.new_rows : args.seq_q;
  if constexpr (Config::varlen) {
    int64_t all = 0;
    fmha_starts(item, args.cu_q, b, args.total_q, item.q_first, all);
    room = args.len_q ? all : fmha_checked(item, all, room, kFmhaBadLength);
    if (room > all) room = all;
  }
  item.q_rows = args.len_q ? fmha_checked(item, args.len_q[b], room, kFmhaBadLength) : room;
  if constexpr (Config::varlen && !kAppend)
    if (item.q_rows > args.seq_q) item.q_rows = fmha_checked(item, item.q_rows, args.seq_q, kFmhaBadLength);

  room = args.seq_k;
  if constexpr (kQueries) {
    room = 0;
  } else if constexpr (Config::paged) {
    const int64_t page = Config::page_size > 0 ? Config::page_size : args.page_size;
    int64_t pages = args.table_stride, first = 0;
    if constexpr (Config::kv_lookup == KvLookup::sglang)
      fmha_starts(item, args.page_starts, b, args.table_stride, first, pages);
    room = fmha_min(room, pages * page);
  } else if constexpr (Config::varlen && !kAppend) {
    int64_t all = 0;
    fmha_starts(item, args.cu_k, b, args.total_k, item.k_first, all);
    room = args.len_k ? all : fmha_checked(item, all, room, kFmhaBadLength);
  } else if (args.cache_index) {
    item.cache = args.cache_index[b];
    if (item.cache < 0 || item.cache >= args.cache_items) {
      item.bad |= kFmhaBadItem, item.culprit = (int32_t)item.cache;
      item.cache = 0, room = 0;
    }
  }
  item.k_rows = item.k_room = room;
  if (!kQueries && args.len_k) item.k_rows = fmha_checked(item, args.len_k[b], room, kFmhaBadLength);
  if (!kQueries && item.k_rows > args.seq_k) item.k_rows = fmha_checked(item, item.k_rows, args.seq_k, kFmhaBadLength);
  item.off = args.bottom_right ? item.k_rows - item.q_rows : 0;
  if constexpr (Config::skip_min) item.skip = item.q_rows < args.min_q;
  return item;
}

// The page that holds a column below item.k_rows (of an append: below the capacity), or -1: the table has no page of the
// cache there, and the column counts as masked. The column's place is column % page_size.
template <class Config>
TW_EVERYWHERE int64_t fmha_page(const tw_fmha_args& args, int64_t b, int64_t column) {
  const uint32_t size = (uint32_t)(Config::page_size > 0 ? Config::page_size : args.page_size);
  const int64_t slot = (uint32_t)column / size;  // columns are fewer than 2^31, and GPUs divide 64 bits by a long way
  int64_t at = b * args.table_stride + slot;
  if constexpr (Config::kv_lookup == KvLookup::sglang) at = fmha_max(args.page_starts[b], 0) + slot;
  const int64_t page = args.block_table[at];
  return page >= 0 && page < args.num_pages ? page : -1;
}

// Column j is visible to row i.
TW_EVERYWHERE bool fmha_visible(const tw_fmha_args& args, const FmhaItem& item, int64_t i, int64_t j) {
  return j < item.k_rows && (args.right < 0 || j <= i + item.off + args.right) &&
         (args.left < 0 || j >= i + item.off - args.left || j < args.sink_size);
}

struct FmhaRange {
  int64_t first, last, sink_last;
};

// Only columns in [0, sink_last) and [first, last) can be visible to rows r0 to r1 - 1; the two do not overlap.
TW_EVERYWHERE FmhaRange fmha_range(const tw_fmha_args& args, const FmhaItem& item, int64_t r0, int64_t r1) {
  FmhaRange range = {0, item.k_rows, 0};
  if (args.right >= 0) range.last = fmha_max(fmha_min(item.k_rows, r1 + item.off + args.right), 0);
  if (args.left >= 0) {
    range.first = fmha_min(fmha_max(r0 + item.off - args.left, 0), range.last);
    range.sink_last = fmha_min(args.sink_size, range.first);
  }
  return range;
}

// Part `split` of a range: parts of the same number of rows, a multiple of n0, counted from `first` rounded down to n0;
// the sink columns belong to part 0. Late parts may be empty.
TW_EVERYWHERE FmhaRange fmha_split(const tw_fmha_args& args, FmhaRange range, int64_t split, int64_t n0) {
  const int64_t start = range.first / n0 * n0;
  int64_t rows = args.split_rows;
  if (rows <= 0) {
    const int64_t share = (uint32_t)(range.last - start + args.splits - 1) / (uint32_t)args.splits;  // GPUs: 32 bits
    rows = fmha_max((share + n0 - 1) / n0, 1) * n0;
  }
  const int64_t end = range.last;
  range.last = split + 1 >= args.splits ? end : fmha_min(start + (split + 1) * rows, end);
  range.first = fmha_min(fmha_max(range.first, start + split * rows), range.last);
  if (split > 0) range.sink_last = 0;
  return range;
}

}  // namespace tw

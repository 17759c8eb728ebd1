// Launch arguments of the kernels that put attention over a shared prefix together with attention over what follows it:
// those of the second, and where the first one's results lie. The Python side packs them field by field
// (tilewright_fmha/plan/prefix.py).
#pragma once
#include "tilewright/core/fmha_item.hpp"

typedef struct tw_fmha_merge_args {
  tw_fmha_args args;           // o and lse: of the own keys of each sequence, changed in place
  tw_fmha_tensor prefix_o;     // (head, row of all queries), of the type of o
  tw_fmha_tensor prefix_lse;   // likewise, fp32
  const int32_t* starts;       // [groups + 1]: rows of all queries; null: every row has a prefix
  const int32_t* prefix_status;  // [4], or null
  int64_t groups, total_rows, group_rows;  // group_rows: of a group, at most
} tw_fmha_merge_args;

#ifdef __cplusplus
static_assert(sizeof(tw_fmha_merge_args) == 1480, "the Python side packs these bytes");

namespace tw {

// Bits of a status that are about a prefix: those of fmha_item.hpp, so many places up.
enum : int32_t { kFmhaPrefixShift = 8 };

// True if a launch over the prefixes wrote row `row` of all queries: by the group that it belongs to, where starts
// ascend. Where they do not, a row may be found in none, and then has no prefix; what nobody wrote is never read.
TW_EVERYWHERE bool fmha_has_prefix(const tw_fmha_merge_args& given, int64_t row) {
  if (!given.starts) return true;
  int64_t low = 0, high = given.groups;  // the last group that begins at or before the row
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (given.starts[middle] <= row) low = middle;
    else high = middle;
  }
  if (given.groups <= 0) return false;
  const int64_t first = fmha_min(fmha_max(given.starts[low], 0), given.total_rows);
  const int64_t end = fmha_min(fmha_max(given.starts[low + 1], 0), given.total_rows);
  return row >= first && row < end && row - first < given.group_rows;
}

// Faults of prefixes join those of the rest: one thread calls this.
TW_EVERYWHERE void fmha_join_status(const tw_fmha_merge_args& given) {
  int32_t* const status = given.args.status;
  if (!status || !given.prefix_status || !given.prefix_status[0]) return;
  if (!status[0]) status[1] = given.prefix_status[1], status[2] = given.prefix_status[2];
  status[0] |= given.prefix_status[0] << kFmhaPrefixShift;
}

}  // namespace tw
#endif

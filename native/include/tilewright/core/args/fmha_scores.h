// Launch arguments of the kernels that write scores or probabilities to memory: those of attention, and what is written
// where. The Python side packs them field by field (tilewright_fmha/plan/scores.py).
#pragma once
#include "tilewright/core/args/fmha.h"

typedef struct tw_fmha_scores_args {
  tw_fmha_args args;
  tw_fmha_tensor to;  // fp32: (item, head, query, key)
  int64_t what;       // tw::kFmhaScaled, ...
} tw_fmha_scores_args;

#ifdef __cplusplus
static_assert(sizeof(tw_fmha_scores_args) == 1400, "the Python side packs these bytes");

namespace tw {

// Stages of a score. Rows and columns that do not exist are 0, -inf among masked ones. The last two lie as a bias does:
// rows count within their item, and an item stride of 0 says that all items have the same.
enum : int64_t {
  kFmhaScaled,         // scale * (q . k)
  kFmhaCapped,         // bent by the soft cap
  kFmhaMasked,         // with bias and ALiBi, -inf where a query does not see a key
  kFmhaProbabilities,  // exp(masked - lse)
  kFmhaAdded,          // bias and ALiBi alone
  kFmhaOpen,           // all but the mask
};

}  // namespace tw
#endif

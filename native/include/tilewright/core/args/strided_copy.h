// Launch arguments of a strided copy (conv_transform), the same bytes on host and device; the Python side packs them
// field by field (tilewright_grouped_conv/strided_copy/plan.py).
#pragma once
#include "tilewright/core/integers.hpp"

// to[i] = from[i] where every index is below `kept`, else zero. The last dimension is the fastest of the destination,
// the one before it the fastest of the source, unless that is the last too. Those that are absent come first, size 1.
typedef struct tw_transform_args {
  const void* from;
  void* to;
  int64_t sizes[6];
  int64_t from_strides[6], to_strides[6];  // in elements
  int64_t kept[6];
} tw_transform_args;

#ifdef __cplusplus
static_assert(sizeof(tw_transform_args) == 208, "the Python side packs these bytes");
#endif

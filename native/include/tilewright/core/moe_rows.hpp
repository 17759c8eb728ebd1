// The one place that knows which rows are an expert's, for every device: no vectors, no library, no device header.
//
// Counts are data that a caller may have wrong: they are cut to the rows that there are, and bits say what was found.
// Nothing outside the tensors is ever read or written.
#pragma once
#include "tilewright/core/args/moe.h"
#include "tilewright/core/block_scales.hpp"
#include "tilewright/core/dtypes.hpp"

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define TW_MOE_INLINE __device__ __forceinline__
#elif defined(__HIP__)
#define TW_MOE_INLINE __attribute__((device)) inline __attribute__((always_inline))
#else
#define TW_MOE_INLINE inline __attribute__((always_inline))
#endif

namespace tw {

// Bits of word 0 of tw_moe_args::status.
enum : int32_t {
  kMoeNegative = 1,    // a count is negative
  kMoeBeyondRoom = 2,  // masked: a count is more than an expert has room for
  kMoeBeyondRows = 4,  // counts are together more than the rows of x
};

// A count cut to `room`: all rows of x, or those of an expert.
TW_MOE_INLINE int64_t moe_cut(int32_t count, int64_t room) { return count < 0 ? 0 : count < room ? count : room; }

// The fault of a count, where `before` rows of x are others'.
TW_MOE_INLINE int32_t moe_fault(const tw_moe_args& args, int32_t count, int64_t before) {
  if (count < 0) return kMoeNegative;
  if (args.masked) return count > args.product.m ? kMoeBeyondRoom : 0;
  return count > args.product.m - before ? kMoeBeyondRows : 0;
}

// One expert after the other.
struct MoeWalk {
  const tw_moe_args& args;
  int64_t expert = 0, before = 0;  // rows of x before this expert's, if those are sorted by expert
  int64_t rows = 0;

  // Moves to `expert` + 1, whose rows are then known.
  TW_MOE_INLINE int32_t take(int32_t count) {
    const int32_t bad = moe_fault(args, count, before);
    rows = moe_cut(count, args.masked ? args.product.m : args.product.m - before);
    return bad;
  }
  TW_MOE_INLINE void next() {
    if (!args.masked) before += rows;
    expert++;
  }
};

// All threads of a launch may find faults; one of them tells.
TW_MOE_INLINE void moe_tell(const tw_moe_args& args) {
  if (!args.status) return;
  MoeWalk at{args};
  int32_t bits = 0, expert = 0, culprit = 0;
  for (; at.expert < args.product.batch; at.next()) {
    const int32_t count = args.counts[at.expert], bad = at.take(count);
    if (bad && !bits) expert = (int32_t)at.expert, culprit = count;
    bits |= bad;
  }
  args.status[0] = bits, args.status[1] = expert, args.status[2] = culprit, args.status[3] = 0;
}

// True for kernels with block scales, which are those of the product.
template <class Config>
constexpr bool kMoeBlocks = false;
template <class Config, int kColumns, int kBlock, class Given>
constexpr bool kMoeBlocks<BlockScaled<Config, kColumns, kBlock, Given>> = true;

// Steps behind the sums, the second parameter of kernels that have them (void: the sums are the results). kGated: the
// product's columns are those of a gate and of another projection in turns of kMoeTurn, the result silu(gate) * other.
// Type: of the results; fp8: brought to its range, with a factor for each row and kMoeBlock columns.
template <bool kGated, class Type>
struct MoeResults {
  using Result = Type;
  static constexpr bool gated = kGated, quantised = is_same<Type, fp8>;
};
constexpr int kMoeTurn = 8, kMoeBlock = 128;
constexpr float kMoeLargest = 448.0f;      // of fp8
constexpr float kMoeLeastRange = 0x1p-100f;  // a block whose largest magnitude is less is treated as if it were this

// Moves block scales to an expert's weights, and to row `row` of x (masked: of the expert's rows). They are fp32.
TW_MOE_INLINE void moe_move_scales(tw_gemm_problem& product, const tw_moe_args& args, int64_t expert, int64_t row) {
  const tw_gemm_operand &x = args.product.scale_a, &w = args.product.scale_b;
  const int64_t item = args.masked ? expert : 0;
  product.scale_a.ptr = (const float*)x.ptr + item * x.batch_stride + row * x.row_stride;
  product.scale_b.ptr = (const float*)w.ptr + expert * w.batch_stride;
}

// alpha times the factors of x and of an expert's weights.
TW_MOE_INLINE double moe_factor(const tw_moe_args& args, int64_t expert) {
  double factor = args.product.alpha;
  if (args.scale_x) factor *= (double)*args.scale_x;
  if (args.scale_w) factor *= (double)args.scale_w[expert * args.scale_w_stride];
  return factor;
}

}  // namespace tw

// Launch arguments of every GEMM kernel, on every device. One plain-old-data struct, the same bytes on host and device.
// The Python side packs it field by field in this order (tilewright_gemm/plan/plan.py); all fields are 8-byte aligned.
#pragma once
#include "tilewright/core/integers.hpp"

// One element-wise operand of the epilogue: element (batch, i, j) is ptr[batch*batch_stride + i*row_stride +
// j*col_stride]. A zero stride broadcasts: row vector (row_stride 0), column vector (col_stride 0), scalar (both 0).
typedef struct tw_gemm_operand {
  const void* ptr;
  int64_t row_stride, col_stride, batch_stride;  // in elements
} tw_gemm_operand;

// C = epilogue(alpha * scale_a * scale_b * A x B). Strides are in elements.
// Row-major A: element (i, p) at a[i*lda + p]; column-major A: a[p*lda + i]. B likewise: b[p*ldb + j] or b[j*ldb + p].
// Pre-shuffled B: see tilewright/cpu/blocks/pack.hpp for the panel format; ldb is then ignored, and stride_b, in
// bytes, is the packed size of one batch item (0 broadcasts).
typedef struct tw_gemm_problem {
  const void* a;
  const void* b;
  void* c;
  int64_t m, n, k;
  int64_t lda, ldb, ldc;
  int64_t batch;
  int64_t stride_a, stride_b, stride_c;  // between batch items; 0 broadcasts (a and b only)
  double alpha;
  double clamp_lo, clamp_hi;  // bounds of the Clamp step
  tw_gemm_operand scale_a;    // fp32: scalar, or one value per row (row_stride 1); used if the kernel has scale_a
  tw_gemm_operand scale_b;    // fp32: scalar, or one value per column (col_stride 1)
  tw_gemm_operand bias;       // row vector over n (col_stride 1), used if the kernel has a bias
  const tw_gemm_operand* d;   // num_d_tensors operands (the count and dtypes are compiled in)
} tw_gemm_problem;

// Arguments of a launch: one problem, or a table of problems of different sizes (grouped GEMM).
typedef struct tw_gemm_args {
  const tw_gemm_problem* problems;
  int64_t count;
  void* workspace;  // device memory, 64-byte aligned, at least the plan's workspace_bytes
  int64_t workspace_bytes;
  int64_t split_k;  // number of K slices (1: none). Slice s covers k in [s*chunk, min(k, (s+1)*chunk)), where
                    // chunk is ceil(k / split_k) rounded up to a multiple of tile_k
} tw_gemm_args;

// GPUs: the head of the kernel's only parameter, which goes by value. One problem: its task follows at the next
// multiple of the task's alignment. Grouped: nothing follows, and `tasks` points to `count` of them in device memory. A
// task is `tw_gemm_problem` (its `d` null), then `first_tile`, then the operands D0, D1, ...; Hopper's ws pipeline puts
// three tensor maps (A, B, C) before it: see tilewright/gpu/gemm/params.hpp.
typedef struct tw_gemm_launch {
  const void* tasks;
  int64_t count;
  int64_t tiles;       // output tiles of all problems and batch items together
  void* workspace;     // partial tiles of split-K and Stream-K
  uint32_t* counters;  // zero when the launch begins; the launch leaves them zero
  int64_t split_k;     // as above
  int64_t workspace_bytes;
  int64_t reserved;
} tw_gemm_launch;

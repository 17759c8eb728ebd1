// Launch arguments of products of experts, on every device: one plain-old-data struct, the same bytes on host and
// device. The Python side packs it field by field in this order (tilewright_moe/plan.py). A CPU gets it by pointer, a
// GPU by value; Hopper's ws pipeline puts three tensor maps (x, w, out) before it.
#pragma once
#include "tilewright/core/args/gemm.h"

typedef struct tw_moe_args {
  // a: x, b: the weights of the first expert, c: the result (whose lines and
  // strides are its own, where it has fewer columns than the product). m: rows of x; masked: rows that an expert has room for.
  // batch: experts. stride_b: from expert to expert; stride_a and stride_c likewise if masked, else 0. Block scales,
  // if the kernel has them, are its scale_a and scale_b, with batch strides like those of a and b.
  tw_gemm_problem product;
  const int32_t* counts;  // [batch]: rows of each expert; what is wrong is cut (core/moe_rows.hpp)
  const float* scale_x;   // null: 1
  const float* scale_w;   // null: 1; of expert e at e * scale_w_stride
  int64_t scale_w_stride;
  int32_t* status;  // [4] or null: bits (core/moe_rows.hpp), the first expert concerned, its count, 0
  int64_t masked;
  void* workspace;  // scratch, 64-byte aligned (CPUs)
  int64_t workspace_bytes;
  // fp32 factors of blocks of results, if the kernel makes them: row_stride from row to row, col_stride from block to
  // block of 128 columns, batch_stride from expert to expert if masked.
  tw_gemm_operand result_scales;
} tw_moe_args;

// Block scales, as the GEMM plugin states them (tilewright_gemm/config/block_scales.py): A has a factor for each row and
// 128 elements of k, B one for 1 or 128 columns and as many of k. Where the factors lie is in `scale_a` and `scale_b` of
// tw_gemm_problem: `row_stride` from one row (of B: column, or block of columns) to the next, `col_stride` from one block
// of k to the next, in fp32.
//
//   C = epilogue(alpha * sum over blocks of scale_a(i, block) * scale_b(j, block) * (sum over k in the block of A x B))
#pragma once

namespace tw {

constexpr int kScaleBlock = 128;  // elements along k

// The configuration of a kernel with block scales; its own `scale_a` and `scale_b`, which the epilogue reads, are none.
template <class Config, int kColumns>
struct BlockScaled : Config {
  using Plain = Config;
  static constexpr int scale_columns = kColumns;  // of a block of B
  static_assert(kColumns == 1 || kColumns == 128, "blocks of B are 1x128 or 128x128");
};
template <class Config>
using Scaled1x128 = BlockScaled<Config, 1>;
template <class Config>
using Scaled128x128 = BlockScaled<Config, 128>;

}  // namespace tw

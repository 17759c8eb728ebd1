// Block scales, as the GEMM plugin states them (tilewright_gemm/config/block_scales.py): A has a factor for each row and
// block of k, B one for 1 or 128 columns and as many of k. Blocks of 128 along k have factors of fp32, blocks of 32
// exponents of 8 bits. Where they lie is in `scale_a` and `scale_b` of tw_gemm_problem: `row_stride` from one row (of B:
// column, or block of columns) to the next, `col_stride` from one block of k to the next, in elements.
//
//   C = epilogue(alpha * sum over blocks of scale_a(i, block) * scale_b(j, block) * (sum over k in the block of A x B))
#pragma once

namespace tw {

constexpr int kScaleBlock = 128;  // elements along k of a block whose factors are fp32

// E8M0: 2^(bits - 127), 255 is NaN.
struct e8m0 {
  unsigned char bits;
};
constexpr unsigned exponent_word(e8m0 x) {  // as fp32; 2^-127 is subnormal
  return x.bits == 255 ? 0x7fc00000u : x.bits == 0 ? 0x00400000u : (unsigned)x.bits << 23;
}

// The configuration of a kernel with block scales; its own `scale_a` and `scale_b`, which the epilogue reads, are none.
// kColumns: of a block of B. kBlock: elements along k. Given: what a factor lies in memory as.
template <class Config, int kColumns, int kBlock = kScaleBlock, class Given = float>
struct BlockScaled : Config {
  using Plain = Config;
  using Factor = Given;
  static constexpr int scale_columns = kColumns, scale_depth = kBlock;
  static_assert(kColumns == 1 || kColumns == 128, "blocks of B have one column or 128");
};
template <class Config>
using Scaled1x128 = BlockScaled<Config, 1>;
template <class Config>
using Scaled128x128 = BlockScaled<Config, 128>;
template <class Config>
using Scaled1x32 = BlockScaled<Config, 1, 32, e8m0>;

}  // namespace tw

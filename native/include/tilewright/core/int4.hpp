// Packed 4-bit weights, as the GEMM plugin states them (tilewright_gemm/config/int4.py): two values a byte along k, the
// even one in the low four bits, columns contiguous; `ldb` and `stride_b` of tw_gemm_problem count bytes. Each column has
// a factor, and maybe a zero point, for every group of 128 values. The factors are `scale_b` (`row_stride` from column to
// column, `col_stride` from group to group, in elements of their type); the zero points, bytes, are the operand behind
// the last D, with strides of the same meaning.
//
//   C = epilogue(alpha * sum over groups of scale_b(j, group) * (sum over k in the group of A x (B - zero_b(j, group))))
#pragma once
#include "tilewright/core/dtypes.hpp"

namespace tw {

constexpr int kInt4Group = 128;  // values along k
constexpr int kInt4Middle = 8;   // the zero point of columns without one

// The configuration of a kernel with packed weights; its own B is the type that values are multiplied in, and its
// scale_b, which the epilogue reads, is none.
template <class Config, class ScaleType, bool kZeros>
struct Int4 : Config {
  using Plain = Config;
  using GroupScale = ScaleType;
  static constexpr bool has_zeros = kZeros;
  static_assert(Config::b_col, "columns of packed weights are contiguous");
};

// By the words of configurations (their scale_b).
template <class Config>
using Int4fp32 = Int4<Config, fp32, false>;
template <class Config>
using Int4fp16 = Int4<Config, fp16, false>;
template <class Config>
using Int4bf16 = Int4<Config, bf16, false>;
template <class Config>
using Int4fp32z = Int4<Config, fp32, true>;
template <class Config>
using Int4fp16z = Int4<Config, fp16, true>;
template <class Config>
using Int4bf16z = Int4<Config, bf16, true>;

}  // namespace tw

// The GEMM of CPUs with block scales: 8-bit floats are widened to fp32 when they are packed, and multiplied with the
// factor of their block there, once for each element. What follows is the blocked GEMM as it is.
#pragma once
#include "tilewright/core/block_scales.hpp"
#include "tilewright/cpu/gemm/gemm.hpp"

TW_NAMESPACE_BEGIN

TW_INLINE float factor_of(float x) { return x; }
TW_INLINE float factor_of(e8m0 x) {
  const unsigned word = exponent_word(x);
  float factor;
  __builtin_memcpy(&factor, &word, sizeof(factor));
  return factor;
}

// Multiplies a panel of kR rows (columns of B) and k_count values of k, from k_begin of the whole product on, with the
// factors of blocks of kLines rows. `first` is the panel's first row, `end` one beyond the last that exists.
template <class Scaled, int kR, int kLines>
TW_NOINLINE void scale_panel(const tw_gemm_operand& scales, int64_t item, int64_t first, int64_t end, int64_t k_begin,
                             int64_t k_count, uint32_t* to) {
  using Factor = typename Scaled::Factor;
  constexpr int kDepth = Scaled::scale_depth;
  const Factor* const base = (const Factor*)scales.ptr + item * scales.batch_stride;
  for (int64_t k = k_begin; k < k_begin + k_count;) {
    const int64_t block = k / kDepth, stop = min_of((block + 1) * kDepth, k_begin + k_count);
    alignas(64) float factors[kR];
    for (int64_t r = 0; r < kR; r++)
      factors[r] = factor_of(base[min_of(first + r, end - 1) / kLines * scales.row_stride + block * scales.col_stride]);
    for (; k < stop; k++, to += kR) {
      if constexpr (kR % kLanes == 0) {
        TW_UNROLL
        for (int r = 0; r < kR; r += kLanes)
          store_as(to + r, (u32v)((f32v)load_as<u32v>(to + r) * load_as<f32v>(factors + r)));
      } else {
        float values[kR];
        __builtin_memcpy(values, to, sizeof(values));
        for (int r = 0; r < kR; r++) values[r] *= factors[r];
        __builtin_memcpy(to, values, sizeof(values));
      }
    }
  }
}

template <class Config, int kColumns, int kBlock, class Given>
struct MatrixSources<BlockScaled<Config, kColumns, kBlock, Given>> : MatrixSources<Config> {
  using Base = MatrixSources<Config>;
  using typename Base::Plan, typename Base::Product;
  static_assert(Plan::depth == 1 && Plan::Dot::is_float, "scaled values are multiplied in fp32");
  static_assert(!Config::preshuffle && Config::pipeline == Pipeline::compv3, "A and B are packed");

  template <bool kIsB>
  static TW_INLINE void pack(const Product& product, int64_t first, int64_t end, int64_t k_begin, int64_t k_count,
                             uint32_t* to, int64_t panel, int32_t* sums) {
    Base::template pack<kIsB>(product, first, end, k_begin, k_count, to, panel, sums);
    constexpr int kR = kIsB ? Plan::nr : Plan::mr, kPanels = kIsB ? Base::together_b : Base::together_a;
    const tw_gemm_problem& problem = *product.out.problem;
    for (int64_t p = 0; p < kPanels && first + p * kR < end; p++)
      scale_panel<BlockScaled<Config, kColumns, kBlock, Given>, kR, kIsB ? kColumns : 1>(
          kIsB ? problem.scale_b : problem.scale_a, product.out.item, first + p * kR, end, product.k0 + k_begin,
          k_count, to + p * panel);
  }
};

TW_NAMESPACE_END

// The GEMM of CPUs whose operands have fewer than 8 bits: values become fp32, times the factors of their blocks, when
// they are packed, one by one. What follows is the blocked GEMM as it is.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/core/narrow.hpp"
#include "tilewright/cpu/gemm/scaled.hpp"

TW_NAMESPACE_BEGIN

// All values of a format, by their codes.
template <class Form>
struct NarrowValues {
  float of[1 << Form::bits] = {};
  constexpr NarrowValues() {
    constexpr int kMantissa = Form::mantissa_bits, kOne = 1 << kMantissa, kHalf = 1 << (Form::bits - 1);
    float unit = 1.0f;  // of the subnormals and of the first normal values
    for (int i = 0; i < Form::bias - 1 + kMantissa; i++) unit /= 2;
    for (int code = 0; code < kHalf; code++) {
      const int exponent = code / kOne;
      float value = unit * (float)(exponent == 0 ? code : code % kOne + kOne);
      for (int i = 1; i < exponent; i++) value *= 2;
      of[code] = value, of[code + kHalf] = -value;
    }
  }
};

// A panel of kR rows (columns of B) and k_count values of k, from k_begin of the whole product on. `first` is the
// panel's first row, `end` one beyond the last that exists; ld: bytes.
template <class Form, int kR>
TW_NOINLINE void pack_narrow(const char* matrix, int64_t ld, const tw_gemm_operand& scales, int64_t item, int64_t first,
                             int64_t end, int64_t k_begin, int64_t k_count, uint32_t* to) {
  static constexpr NarrowValues<Form> kValues;
  constexpr int kBits = Form::bits, kDepth = 32;
  const e8m0* const factors = (const e8m0*)scales.ptr + item * scales.batch_stride;
  for (int64_t r = 0; r < kR; r++) {
    const bool exists = first + r < end;
    const unsigned char* const line = (const unsigned char*)matrix + (exists ? first + r : first) * ld;
    const e8m0* const own = factors + (first + r) * scales.row_stride;
    float factor = 0.0f;
    for (int64_t i = 0; i < k_count; i++) {
      float x = 0.0f;
      if (exists) {
        const int64_t k = k_begin + i, bit = k * kBits, byte = bit / 8;
        if (i == 0 || k % kDepth == 0) factor = factor_of(own[k / kDepth * scales.col_stride]);
        unsigned code = line[byte] >> (bit % 8);
        if (bit % 8 + kBits > 8) code |= (unsigned)line[byte + 1] << (8 - bit % 8);
        x = kValues.of[code % (1u << kBits)] * factor;
      }
      __builtin_memcpy(to + i * kR + r, &x, sizeof(x));
    }
  }
}

template <class Config, class FormA, class FormB>
struct MatrixSources<Narrow<Config, FormA, FormB>> : MatrixSources<Scaled1x32<Config>> {
  using Base = MatrixSources<Scaled1x32<Config>>;
  using typename Base::Plan, typename Base::Product;

  template <bool kIsB>
  static TW_INLINE void pack(const Product& product, int64_t first, int64_t end, int64_t k_begin, int64_t k_count,
                             uint32_t* to, int64_t panel, int32_t* sums) {
    using Form = Choose<kIsB, FormB, FormA>;
    if constexpr (width_of<Form> == 8) {
      Base::template pack<kIsB>(product, first, end, k_begin, k_count, to, panel, sums);
    } else {
      constexpr int kR = kIsB ? Plan::nr : Plan::mr, kPanels = kIsB ? Base::together_b : Base::together_a;
      const tw_gemm_problem& problem = *product.out.problem;
      for (int64_t p = 0; p < kPanels && first + p * kR < end; p++)
        pack_narrow<Form, kR>(kIsB ? product.b : product.a, kIsB ? product.ldb : product.lda,
                              kIsB ? problem.scale_b : problem.scale_a, product.out.item, first + p * kR, end,
                              product.k0 + k_begin, k_count, to + p * panel);
    }
  }
};

TW_NAMESPACE_END

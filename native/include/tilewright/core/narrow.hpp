// Floating-point formats of fewer than 8 bits, as the GEMM plugin states them (tilewright_gemm/config/narrow.py): packed
// along k, the first value in the lowest bits of the first byte, without gaps but for the end of a line. None has
// infinities or NaNs, and all of their values are values of E4M3. Lines, and `lda`, `ldb` and strides of batches in
// tw_gemm_problem, are bytes. Blocks of 32 values have exponents (core/block_scales.hpp).
#pragma once
#include "tilewright/core/block_scales.hpp"
#include "tilewright/core/dtypes.hpp"

namespace tw {

// kCode: by which matrix instructions of gfx950 are told the format.
template <int kExponent, int kMantissa, int kCode>
struct NarrowFloat {
  static constexpr int bits = 1 + kExponent + kMantissa, bias = (1 << (kExponent - 1)) - 1;
  static constexpr int mantissa_bits = kMantissa, code = kCode;
};
struct fp4 : NarrowFloat<2, 1, 4> {};  // E2M1: largest value 6
struct fp6 : NarrowFloat<2, 3, 2> {};  // E2M3: largest value 7.5
struct bf6 : NarrowFloat<3, 2, 3> {};  // E3M2: largest value 28

// Bits of a value: of these formats, or of 8-bit floats.
template <class E>
constexpr int width_of = 8;
template <>
constexpr int width_of<fp4> = fp4::bits;
template <>
constexpr int width_of<fp6> = fp6::bits;
template <>
constexpr int width_of<bf6> = bf6::bits;

// The same value in E4M3.
template <class E>
constexpr unsigned widened(unsigned code) {
  constexpr int kMantissa = E::mantissa_bits, kLeast = E::bias - 1 + kMantissa;  // subnormals count in 2^-kLeast
  constexpr unsigned kMagnitude = (1u << (E::bits - 1)) - 1;
  constexpr unsigned long long kIntegers = 0x4e4c4a4844403800ull;  // 0 to 7 in E4M3, the first one lowest
  const unsigned magnitude = code & kMagnitude;
  const unsigned sign = (code >> (E::bits - 1) & 1) << 7;
  if (magnitude == 0) return sign;
  if (magnitude >> kMantissa != 0) return sign | ((magnitude << (3 - kMantissa)) + ((7 - E::bias) << 3));
  return sign | (((unsigned)(kIntegers >> (magnitude * 8)) & 0xff) - (kLeast << 3));
}

// The configuration of a kernel whose A or B is of such a format, or both. FormA, FormB: what lies in memory, 8-bit
// floats too; its own A and B are what values are widened to.
template <class Config, class FormA, class FormB>
struct Narrow : Scaled1x32<Config> {
  static_assert(!Config::a_col && Config::b_col, "values of narrow formats lie along k");
};
// `Stored<fp4>::And<fp8>::Of<Config>`: without commas, which macros take apart.
template <class FormA>
struct Stored {
  template <class FormB>
  struct And {
    template <class Config>
    using Of = Narrow<Config, FormA, FormB>;
  };
};

}  // namespace tw

// Element types as tags, for every device: no vectors, no library headers.
#pragma once
#include "tilewright/core/integers.hpp"

namespace tw {

// A floating-point format of less than 32 bits. kHasInf: all-ones exponents are infinities and NaNs; else only the
// all-ones pattern is a NaN.
template <class Bits, int kExponent, int kMantissa, bool kHasInf>
struct SmallFloat {
  using storage = Bits;
  static constexpr bool is_float = true;
  static constexpr int exponent_bits = kExponent, mantissa_bits = kMantissa, bias = (1 << (kExponent - 1)) - 1;
  static constexpr bool has_inf = kHasInf;
};

struct fp32 {
  using storage = float;
  static constexpr bool is_float = true;
};
struct fp16 : SmallFloat<uint16_t, 5, 10, true> {};
struct bf16 : SmallFloat<uint16_t, 8, 7, true> {};
struct fp8 : SmallFloat<uint8_t, 4, 3, false> {};  // OCP E4M3: largest value 448, no infinity
struct bf8 : SmallFloat<uint8_t, 5, 2, true> {};   // OCP E5M2: largest value 57344
struct int8 {
  using storage = int8_t;
  static constexpr bool is_float = false;
};
struct int32 {
  using storage = int32_t;
  static constexpr bool is_float = false;
};

template <class T, class U>
constexpr bool is_same = false;
template <class T>
constexpr bool is_same<T, T> = true;

template <class E>
constexpr int size_of = (int)sizeof(typename E::storage);

}  // namespace tw

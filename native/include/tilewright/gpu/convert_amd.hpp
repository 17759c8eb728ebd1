// Clients' 8-bit floats (OCP E4M3 and E5M2) as what a GPU's matrix unit takes, four at a time.
//
// gfx942 multiplies the FNUZ formats, whose exponents are biased by one more: the same bits are half the value. Three
// kinds of codes mean something else there: 0x80 is the only NaN (OCP: -0); OCP's NaNs, and the infinities of E5M2, are
// numbers. -0 becomes 0; NaNs and infinities become NaN, for FNUZ has no infinity.
//
// gfx90a multiplies no 8-bit floats; they are widened, exactly, to bf16. (Not to fp16: its matrix unit takes subnormal
// fp16 values, which small E5M2 values are, for zero.) E4M3 comes out as 2^-8 of its value.
#pragma once
#include "tilewright/core/dtypes.hpp"
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

template <class E>
constexpr bool kIsSmallFloat = is_same<E, fp8> || is_same<E, bf8>;

#if defined(__gfx942__)
template <class E>
constexpr bool kIsFnuz = kIsSmallFloat<E>;
template <class E>
constexpr float kOperandScale = kIsSmallFloat<E> ? 2.0f : 1.0f;
#elif defined(__gfx90a__)
template <class E>
constexpr bool kIsFnuz = false;
template <class E>
constexpr float kOperandScale = is_same<E, fp8> ? 256.0f : 1.0f;  // a value is so many times what is multiplied
#else
template <class E>
constexpr bool kIsFnuz = false;
template <class E>
constexpr float kOperandScale = 1.0f;
#endif

// The FNUZ codes for four OCP codes (or a vector of fours).
template <class E, class Word>
TW_DEVICE Word fnuz_bytes(Word x) {
  constexpr uint32_t kBits = 0x7f7f7f7fu, kSigns = 0x80808080u;
  constexpr uint32_t kFirstSpecial = is_same<E, fp8> ? 0x7f : 0x7c;  // of the magnitudes
  const Word magnitude = x & kBits;
  const Word nonzero = magnitude + kBits;  // sign bits: of bytes that are neither 0 nor -0
  const Word special = (magnitude + (0x80 - kFirstSpecial) * 0x01010101u) & kSigns;
  const Word kept = ~(special - (special >> 7));  // not the magnitudes of specials
  return (x & (nonzero | kBits) & kept) | special;
}

// Two values of which fp16 patterns are given: exact.
TW_DEVICE uint32_t bfloats_of_halves(uint32_t x) {
  const uint32_t low = bits_of(half_to_float((uint16_t)x)), high = bits_of(half_to_float((uint16_t)(x >> 16)));
  return permute_bytes(low, high, 0x7632);
}

// Four bf16 values, times kOperandScale the given ones.
template <class E>
TW_DEVICE Vector<uint32_t, 2> widen_bytes(uint32_t x) {
  constexpr int kFirst = 0x1404, kSecond = 0x3424;  // bytes 0, 1 (2, 3) as the upper halves of words of 16 bits
  if constexpr (is_same<E, bf8>) {                  // which are fp16
    return {bfloats_of_halves(permute_bytes(x, 0, kFirst)), bfloats_of_halves(permute_bytes(x, 0, kSecond))};
  } else {
    const uint32_t magnitude = x & 0x7f7f7f7fu;
    const uint32_t nan = (magnitude + 0x01010101u) & 0x80808080u;  // becomes the top bit of the exponent: a NaN
    const uint32_t y = magnitude | nan;
    const auto halves = [&](int select) {  // the sign; the fields a place lower, where fp16 has one more bit of exponent
      return (permute_bytes(x, 0, select) & 0x80008000u) | (permute_bytes(y, 0, select) >> 1 & 0x7fff7fffu);
    };
    return {bfloats_of_halves(halves(kFirst)), bfloats_of_halves(halves(kSecond))};
  }
}

}  // namespace tw::gpu

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

// The FNUZ codes for four OCP codes. v_lerp_u8 adds two bytes and a bit, and halves: without carries from byte to byte,
// and bit 7 says whether the sum is 256 or more.
template <class E>
TW_DEVICE uint32_t fnuz_bytes(uint32_t x) {
  constexpr uint32_t kBits = 0x7f7f7f7fu, kSigns = 0x80808080u, kOnes = 0x01010101u;
  constexpr uint32_t kFirstSpecial = is_same<E, fp8> ? 0x7f : 0x7c;  // of the magnitudes
  const uint32_t signs = __builtin_amdgcn_lerp(x, kBits, 0);         // bit 7: the byte is 0x81 or more, so not -0
  const uint32_t magnitude = x & kBits, specials = magnitude + (0x80 - kFirstSpecial) * kOnes;  // bit 7
  if constexpr (is_same<E, fp8>) {
    // The mean of a magnitude and the next one, rounded up if the next one is 0x80.
    return (signs & kSigns) | __builtin_amdgcn_lerp(magnitude, specials, specials >> 7);
  } else {
    const uint32_t selector = (specials >> 5 & 4 * kOnes) | 0x03020100u;  // bytes 4 to 7 for the special ones
    return __builtin_amdgcn_perm(kSigns, (signs & kSigns) | magnitude, selector);
  }
}
template <class E, int kCount>
TW_DEVICE void mend_bytes(Vector<uint32_t, kCount>& x) {
  TW_UNROLL
  for (int w = 0; w < kCount; w++) x[w] = fnuz_bytes<E>(x[w]);
}

// Words of elements on their way to a tile in LDS.
template <class Tile, int kCount>
TW_DEVICE Words<kCount> stored_words(Words<kCount> x) {
  if constexpr (kIsFnuz<typename Tile::Element> && !Tile::raw) {
    TW_UNROLL
    for (int w = 0; w < kCount; w++) x.w[w] = fnuz_bytes<typename Tile::Element>(x.w[w]);
  }
  return x;
}

// Two values of which fp16 patterns are given: exact.
TW_DEVICE uint32_t bfloats_of_halves(uint32_t x) {
  const uint32_t low = bits_of(half_to_float((uint16_t)x)), high = bits_of(half_to_float((uint16_t)(x >> 16)));
  return permute_bytes(low, high, 0x7632);
}

// Four bf16 values; kOperandScale times these are the given ones.
template <class E>
TW_DEVICE Vector<uint32_t, 2> widen_bytes(uint32_t x) {
  const auto halves = [](uint32_t y) {  // of two bytes, each in the upper half of 16 bits
    if constexpr (is_same<E, bf8>) return y;  // which is fp16
    // fp16 has one more bit of exponent: it is 0, or 1 for a NaN (whose fields are all ones).
    const uint32_t x16 = bits_as<uint32_t>(bits_as<Vector<short, 2>>(y) >> 1) & 0xbfffbfffu;
    return x16 | ((x16 + 0x00800080u) & 0x40004000u);
  };
  const uint32_t first = permute_bytes(x, 0, 0x1404), second = permute_bytes(x, 0, 0x3424);
  return {bfloats_of_halves(halves(first)), bfloats_of_halves(halves(second))};
}

}  // namespace tw::gpu

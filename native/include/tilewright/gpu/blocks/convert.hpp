// Element types to and from fp32, by the rules of core/types.hpp: exact towards fp32; to nearest even from it, fp16 and
// bf16 overflowing to infinity, integers saturating (a NaN gives 0).
#pragma once
#include "tilewright/core/dtypes.hpp"
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

template <class E>
TW_DEVICE float to_float(typename E::storage raw) {
  if constexpr (is_same<E, fp32>) return raw;
  else if constexpr (is_same<E, int32> || is_same<E, int8>) return (float)raw;
  else if constexpr (is_same<E, fp16>) return half_to_float(raw);
  else if constexpr (is_same<E, bf16>) return float_of((uint32_t)raw << 16);
  else if constexpr (is_same<E, bf8>) return half_to_float((uint16_t)(raw << 8));  // E5M2 is the upper half of fp16
  else {
    static_assert(is_same<E, fp8>, "no such element type");
    // The same fields in fp16, whose exponents are biased by 8 more: exact for subnormals too.
    const float x = half_to_float((uint16_t)((raw & 0x7f) << 7 | (raw & 0x80) << 8)) * 256.0f;
    return (raw & 0x7f) == 0x7f ? float_of(0x7fc00000u | (uint32_t)(raw & 0x80) << 24) : x;
  }
}

template <class E>
TW_DEVICE typename E::storage from_float(float x) {
  if constexpr (is_same<E, fp32>) return x;
  else if constexpr (is_same<E, int32>) return nearest_integer(x);
  else if constexpr (is_same<E, int8>) return (int8_t)max_of(-128, min_of(127, nearest_integer(x)));
  else if constexpr (is_same<E, fp16>) return (uint16_t)pack_halves(x, 0.0f);
  else {
    static_assert(is_same<E, bf16>, "fp8 and bf8 are never results");
    return (uint16_t)pack_bfloats(x, 0.0f);
  }
}

// kCount elements of type E as they lie in memory; `w` where they fill whole registers.
template <class E, int kCount, bool kWords = (kCount * size_of<E> % 4 == 0)>
struct Packed {
  static constexpr bool words = true;
  Words<kCount * size_of<E> / 4> data;
  TW_DEVICE typename E::storage get(int i) const {
    if constexpr (size_of<E> == 4) return bits_as(data.w[i]);
    else if constexpr (size_of<E> == 2) return (typename E::storage)(data.w[i / 2] >> (i % 2 * 16));
    else return (typename E::storage)(data.w[i / 4] >> (i % 4 * 8));
  }

 private:
  TW_DEVICE static typename E::storage bits_as(uint32_t bits) {
    if constexpr (is_same<E, fp32>) return float_of(bits);
    else return (typename E::storage)bits;
  }
};
template <class E, int kCount>
struct Packed<E, kCount, false> {
  static constexpr bool words = false;
  typename E::storage data[kCount];
  TW_DEVICE typename E::storage get(int i) const { return data[i]; }
};

template <class E, int kCount>
TW_DEVICE Packed<E, kCount> pack(const float (&x)[kCount]) {
  Packed<E, kCount> y;
  TW_UNROLL
  for (int i = 0; i < kCount; i++) {
    if constexpr (!Packed<E, kCount>::words) y.data[i] = from_float<E>(x[i]);
    else if constexpr (is_same<E, fp32>) y.data.w[i] = bits_of(x[i]);
    else if constexpr (is_same<E, int32>) y.data.w[i] = (uint32_t)nearest_integer(x[i]);
    else if constexpr (size_of<E> == 2) {
      if (i % 2 == 0)
        y.data.w[i / 2] = is_same<E, fp16> ? pack_halves(x[i], x[i + 1]) : pack_bfloats(x[i], x[i + 1]);
    } else {
      const uint32_t byte = (uint32_t)(uint8_t)from_float<E>(x[i]) << (i % 4 * 8);
      y.data.w[i / 4] = i % 4 == 0 ? byte : y.data.w[i / 4] | byte;
    }
  }
  return y;
}

}  // namespace tw::gpu

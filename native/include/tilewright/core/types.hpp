// Element types and their conversions to and from fp32, one value or one vector at a time.
//
// Rules, the same on every level:
//  * Every value of fp16, bf16, fp8, bf8 converts to fp32 exactly; subnormals are kept and a NaN stays a NaN.
//  * From fp32: round to nearest, ties to even. fp16 and bf16 overflow to infinity as IEEE 754 says. fp8 and bf8
//  saturate: what lies beyond the
//    largest finite value, infinity included, becomes that value. int8 and int32 round to nearest even and saturate; a
//    NaN becomes 0.
#pragma once
#include "tilewright/core/dtypes.hpp"
#include "tilewright/core/vector.hpp"

TW_NAMESPACE_BEGIN

// ---- one vector of L elements ----

// Decode L elements whose raw bits stand in the low bits of the lanes.
template <class E>
TW_INLINE f32v decode_lanes(u32v raw) {
  if constexpr (is_same<E, bf16>) return (f32v)(raw << 16);
  constexpr int kShift = 23 - E::mantissa_bits, kWidth = E::exponent_bits + E::mantissa_bits;
  constexpr uint32_t kMagnitude = (1u << kWidth) - 1, kRebias = (uint32_t)(127 - E::bias) << 23;
  constexpr uint32_t kFirstNormal = 1u << E::mantissa_bits;
  const u32v magnitude = raw & kMagnitude;
  const u32v normal = (magnitude << kShift) + kRebias;
  // A subnormal is its mantissa times a power of two: give it the exponent of the first normal, then take the implicit
  // one away again (exact).
  const u32v one = splat_bits(kRebias + (1u << 23));
  const u32v subnormal = (u32v)((f32v)((magnitude << kShift) + one) - (f32v)one);
  u32v result = select((i32v)(magnitude < kFirstNormal), subnormal, normal);
  if constexpr (E::has_inf) {
    constexpr uint32_t kInfinity = ((1u << E::exponent_bits) - 1) << E::mantissa_bits;
    result |= (u32v)(magnitude >= kInfinity) & 0x7f800000u;
  } else {
    result |= (u32v)(magnitude == kMagnitude) & 0x7fffffffu;
  }
  return (f32v)(result | ((raw >> kWidth) << 31));
}

// The inverse, with rounding; the raw bits come back in the low bits of the lanes.
template <class E>
TW_INLINE u32v encode_lanes(f32v value) {
  constexpr int kShift = 23 - E::mantissa_bits, kWidth = E::exponent_bits + E::mantissa_bits;
  const u32v bits = (u32v)value, magnitude = bits & 0x7fffffffu;
  const i32v is_nan = (i32v)(magnitude > 0x7f800000u);
  if constexpr (is_same<E, bf16>) {
    const u32v rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return select(is_nan, (bits >> 16) | 0x40u, rounded);
  } else {
    constexpr bool kSaturate = sizeof(typename E::storage) == 1;
    constexpr uint32_t kRebias = (uint32_t)(127 - E::bias) << 23;
    constexpr uint32_t kLimit = E::has_inf ? ((1u << E::exponent_bits) - 1) << E::mantissa_bits
                                           : (1u << kWidth) - 1;  // the first code that is not finite
    constexpr uint32_t kNan = E::has_inf ? kLimit | (1u << (E::mantissa_bits - 1)) : kLimit;
    const u32v odd = (magnitude >> kShift) & 1u;
    const u32v normal = (magnitude - kRebias + ((1u << (kShift - 1)) - 1u) + odd) >> kShift;
    // Below the first normal the unit is constant: adding a float whose last bit is that unit makes the processor round
    // for us.
    constexpr uint32_t kUnit = (uint32_t)(127 - E::bias + kShift + 1) << 23;
    const u32v subnormal = (u32v)((f32v)magnitude + (f32v)splat_bits(kUnit)) - kUnit;
    u32v code = select((i32v)(magnitude < kRebias + (1u << 23)), subnormal, normal);
    constexpr uint32_t kBiggest = kSaturate ? kLimit - 1 : kLimit;
    const i32v beyond = (i32v)((code > kBiggest) | (magnitude >= 0x7f800000u));
    code = select(beyond, splat_bits(kBiggest), code);
    code = select(is_nan, splat_bits(kNan), code);
    return code | ((bits >> 31) << kWidth);
  }
}

// Nearest integer, ties to even, saturated; NaN gives 0.
TW_INLINE i32v round_to_i32(f32v x) {
  // Adding and subtracting 2^23 (with the sign of x) leaves the nearest integer; what is larger has no fraction.
  const u32v sign = (u32v)x & 0x80000000u;
  const f32v magic = (f32v)(sign | 0x4b000000u);
  const i32v has_fraction = (f32v)((u32v)x & 0x7fffffffu) < 8388608.0f;
  const f32v whole = select(has_fraction, (x + magic) - magic, x);
  const i32v too_big = whole >= 2147483648.0f, too_small = whole < -2147483648.0f, ordered = x == x;
  const i32v safe = ordered & ~too_big & ~too_small;
  const i32v result = __builtin_convertvector((f32v)((u32v)whole & (u32v)safe), i32v);
  return (i32v)select(too_big, splat_bits(0x7fffffffu), select(too_small, splat_bits(0x80000000u), (u32v)result));
}

template <class E>
TW_INLINE u32v load_raw(const void* from) {  // L elements, zero-extended
  if constexpr (size_of<E> == 1) return widen_u8(from);
  else if constexpr (size_of<E> == 2) return widen_u16(from);
  else return load_as<u32v>(from);
}

#if defined(__F16C__) || defined(__aarch64__)
#define TW_NATIVE_FP16 1
#else
#define TW_NATIVE_FP16 0
#endif

TW_INLINE f32v load_fp16(const void* from) {
#if TW_NATIVE_FP16 && (defined(__clang__) || defined(__aarch64__))
  typedef _Float16 half_vector __attribute__((vector_size(kVectorBytes / 2)));
  return __builtin_convertvector(load_as<half_vector>(from), f32v);
#elif TW_NATIVE_FP16 && defined(__AVX512F__)
  return __builtin_ia32_vcvtph2ps512_mask(load_as<v16hi>(from), f32v{}, (unsigned short)-1, 4);
#elif TW_NATIVE_FP16 && defined(__AVX2__)
  return __builtin_ia32_vcvtph2ps256(load_as<v8hi>(from));
#else
  return decode_lanes<fp16>(widen_u16(from));
#endif
}

TW_INLINE void store_fp16(void* to, f32v value) {
#if TW_NATIVE_FP16 && (defined(__clang__) || defined(__aarch64__))
  typedef _Float16 half_vector __attribute__((vector_size(kVectorBytes / 2)));
  store_as(to, __builtin_convertvector(value, half_vector));
#elif TW_NATIVE_FP16 && defined(__AVX512F__)
  store_as(to, __builtin_ia32_vcvtps2ph512_mask(value, 0, v16hi{}, (unsigned short)-1));
#elif TW_NATIVE_FP16 && defined(__AVX2__)
  store_as(to, __builtin_ia32_vcvtps2ph256(value, 0));
#else
  store_low_u16(to, encode_lanes<fp16>(value));
#endif
}

template <class E>
TW_INLINE f32v load_f32(const void* from) {  // L elements as fp32
  if constexpr (is_same<E, fp32>) return load_as<f32v>(from);
  else if constexpr (is_same<E, int32>) return __builtin_convertvector(load_as<i32v>(from), f32v);
  else if constexpr (is_same<E, int8>) return __builtin_convertvector((i32v)(widen_u8(from) << 24) >> 24, f32v);
  else if constexpr (is_same<E, fp16>) return load_fp16(from);
  else return decode_lanes<E>(load_raw<E>(from));
}

template <class E>
TW_INLINE void store_f32(void* to, f32v value) {  // L elements from fp32
  if constexpr (is_same<E, fp32>) store_as(to, value);
  else if constexpr (is_same<E, int32>) store_as(to, round_to_i32(value));
  else if constexpr (is_same<E, fp16>) store_fp16(to, value);
  else if constexpr (is_same<E, bf16>) store_low_u16(to, encode_lanes<bf16>(value));
  else if constexpr (is_same<E, int8>) {
    const i32v whole = round_to_i32(value);
    const i32v low = (i32v)select(whole < -128, (u32v)(i32v{} - 128), (u32v)whole);
    store_low_u8(to, select(low > 127, splat_bits(127), (u32v)low));
  } else store_low_u8(to, encode_lanes<E>(value));
}

// ---- edges: the first `count` (1 to L) elements only; nothing beyond them is read or written ----

template <class E>
TW_INLINE f32v load_f32_partial(const void* from, int64_t count) {
  if (count >= kLanes) return load_f32<E>(from);
  alignas(64) unsigned char buffer[kVectorBytes] = {};
  __builtin_memcpy(buffer, from, (size_t)count * size_of<E>);
  return load_f32<E>(buffer);
}

template <class E>
TW_INLINE void store_f32_partial(void* to, f32v value, int64_t count) {
  if (count >= kLanes) return store_f32<E>(to, value);
  alignas(64) unsigned char buffer[kVectorBytes];
  store_f32<E>(buffer, value);
  __builtin_memcpy(to, buffer, (size_t)count * size_of<E>);
}

// One element.
template <class E>
TW_INLINE float to_float(const void* from) {
  if constexpr (is_same<E, fp32>) return load_as<float>(from);
  else return load_f32_partial<E>(from, 1)[0];
}

TW_NAMESPACE_END

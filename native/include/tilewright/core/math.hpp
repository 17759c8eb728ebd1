// Elementary functions on vectors of fp32. Each states its largest error as tests/native measures it; NaN gives NaN.
#pragma once
#include "tilewright/core/vector.hpp"

TW_NAMESPACE_BEGIN

template <class... Rest>
TW_INLINE f32v horner(f32v, float last) {
  return splat(last);
}
// c0 + c1 x + c2 x^2 + ..., the lowest coefficient first
template <class... Rest>
TW_INLINE f32v horner(f32v x, float first, float second, Rest... rest) {
  return first + x * horner(x, second, rest...);
}

TW_INLINE f32v abs(f32v x) { return (f32v)((u32v)x & 0x7fffffffu); }
TW_INLINE f32v copy_sign(f32v magnitude, f32v sign) {
  return (f32v)(((u32v)magnitude & 0x7fffffffu) | ((u32v)sign & 0x80000000u));
}
// Bounds that let a NaN through (both comparisons are false for it).
TW_INLINE f32v clamp(f32v x, f32v lo, f32v hi) {
  x = select(x < lo, lo, x);
  return select(x > hi, hi, x);
}

// e^x, relative error below 2e-7 where the result is normal; underflows gradually and overflows to infinity.
// x = n ln 2 + r, |r| <= ln 2 / 2, Taylor to degree 7 in r; 2^n is applied in two halves so that the ends of the range
// come out right.
TW_INLINE f32v exp(f32v x) {
  const f32v bounded = clamp(x, splat(-104.0f), splat(89.0f));
  const f32v shifted = bounded * 1.44269504089f + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
  const i32v n = (i32v)shifted - 0x4b400000;
  const f32v whole = shifted - 12582912.0f;
  const f32v r = (bounded - whole * 0.693359375f) - whole * -2.12194440e-4f;
  const f32v p = horner(r, 1.0f, 1.0f, 0.5f, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040);
  const i32v half = n >> 1;
  const f32v scaled = p * (f32v)((half + 127) << 23) * (f32v)((n - half + 127) << 23);
  return select(x == x, scaled, x);
}

// e^x - 1, relative error below 3e-7 for x <= 0: Taylor to degree 8 near zero, where the subtraction would cancel.
TW_INLINE f32v expm1_below_zero(f32v x) {
  const f32v near = x * horner(x, 1.0f, 1.0f / 2, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040, 1.0f / 40320);
  return select(x > -0.5f, near, exp(x) - 1.0f);
}

// ln(1 + t), relative error below 3e-7 for t from 0 to 1: 2 atanh(t / (2 + t)), whose argument is at most 1/3.
TW_INLINE f32v log1p_unit(f32v t) {
  const f32v s = t / (2.0f + t), z = s * s;
  return 2.0f * s * horner(z, 1.0f, 1.0f / 3, 1.0f / 5, 1.0f / 7, 1.0f / 9, 1.0f / 11, 1.0f / 13);
}

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// Lane by lane; y where one of the two is a NaN. g++ 12 would make two instructions of each comparison.
TW_INLINE f32v max(f32v x, f32v y) {
#if TW_VECTOR_BYTES == 64 && !defined(__clang__)
  return __builtin_ia32_maxps512_mask(x, y, f32v{}, (unsigned short)-1, 4);
#elif TW_VECTOR_BYTES == 32 && !defined(__clang__)
  return __builtin_ia32_maxps256(x, y);
#else
  return x > y ? x : y;
#endif
}
TW_INLINE f32v min(f32v x, f32v y) {
#if TW_VECTOR_BYTES == 64 && !defined(__clang__)
  return __builtin_ia32_minps512_mask(x, y, f32v{}, (unsigned short)-1, 4);
#elif TW_VECTOR_BYTES == 32 && !defined(__clang__)
  return __builtin_ia32_minps256(x, y);
#else
  return x < y ? x : y;
#endif
}

// 2^x, relative error below 2e-7. What would be less than 2^-126 is something from 0 to 2^-126, and 0 from x = -127
// down; from 127.5 up it is infinity. x = n + r, |r| <= 1/2: a polynomial in r (minimax, and 2^0 is 1), times 2^n.
TW_INLINE f32v exp2(f32v x) {
  const f32v bounded = min(splat(128.0f), max(splat(-127.0f), x));
  const f32v shifted = bounded + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
  const f32v r = bounded - (shifted - 12582912.0f);
  const f32v p = horner(r, 1.0f, 0.69314720f, 0.24022648f, 0.055503324f, 0.009618437f, 0.0013398875f, 0.00015353362f);
  return p * (f32v)(((i32v)shifted << 23) + 0x3f800000);
}

// ln x, absolute error below 2e-7 or relative error below 2e-7, whichever is more (Cephes, logf); -inf for zero. A
// subnormal x counts as 2^-126.
TW_INLINE f32v log(f32v x) {
  const i32v bits = (i32v)max(splat(1.17549435e-38f), x) - 0x3f3504f3;  // of sqrt(1/2): the significand begins there
  const f32v r = (f32v)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f, e = __builtin_convertvector(bits >> 23, f32v);
  const f32v p = horner(r, 3.3333331174e-1f, -2.4999993993e-1f, 2.0000714765e-1f, -1.6668057665e-1f, 1.4249322787e-1f,
                        -1.2420140846e-1f, 1.1676998740e-1f, -1.1514610310e-1f, 7.0376836292e-2f);
  const f32v z = r * r;
  const f32v y = r + (z * (r * p - 0.5f) + e * -2.12194440e-4f) + e * 0.693359375f;
  const f32v special = select(x == 0.0f, splat(-__builtin_inff()), select(x < 0.0f, splat(__builtin_nanf("")), x));
  return select((x > 0.0f) & (x < __builtin_inff()), y, special);
}

// Relative error below 3e-7: an odd polynomial (Cephes, tanhf) near zero, where 1 - e^-2x would cancel.
TW_INLINE f32v tanh(f32v x) {
  const f32v z = x * x, magnitude = abs(x);
  const f32v near = x + x * z *
                            horner(z, -3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f, 2.06390887954e-2f,
                                   -5.70498872745e-3f);
  const f32v e = exp(-2.0f * magnitude);
  const f32v far = copy_sign((1.0f - e) / (1.0f + e), x);
  return select(magnitude < 0.625f, near, far);
}

// Absolute error below 5e-7: a rational approximation on [-4, 4] (Eigen, erf for float), constant beyond, where erf is
// 1 to the last bit.
TW_INLINE f32v erf(f32v x) {
  const f32v v = clamp(x, splat(-4.0f), splat(4.0f)), z = v * v;
  const f32v p =
      v * horner(z, -1.60960333262415e-02f, -2.95459980854025e-03f, -7.34990630326855e-04f, -5.69250639462346e-05f,
                 -2.10102402082508e-06f, 2.77068142495902e-08f, -2.72614225801306e-10f);
  const f32v q = horner(z, -1.42647390514189e-02f, -7.37332916720468e-03f, -1.68282697438203e-03f,
                        -2.13374055278905e-04f, -1.45660718464996e-05f);
  return p / q;
}

TW_NAMESPACE_END

// The fused element-wise steps of core/elementwise.hpp, on one fp32 value; formulas and errors as core/math.hpp states
// them. Fused multiply-adds and reciprocals only: cheap enough for the epilogue of any kernel. A NaN passes through
// every step.
#pragma once
#include "tilewright/core/options.hpp"
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

TW_DEVICE float horner(float, float last) { return last; }
// c0 + c1 x + c2 x^2 + ..., the lowest coefficient first
template <class... Rest>
TW_DEVICE float horner(float x, float first, float second, Rest... rest) {
  return fma(x, horner(x, second, rest...), first);
}

TW_DEVICE float magnitude_of(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
// Bounds that let a NaN through (both comparisons are false for it).
TW_DEVICE float clamp(float x, float lo, float hi) {
  x = x < lo ? lo : x;
  return x > hi ? hi : x;
}

// e^x, relative error below 4e-7 where the result is normal; e^88.72 from there on.
TW_DEVICE float exp(float x) {
  const float bounded = clamp(x, -104.0f, 88.72f);
  const float whole = bounded * 1.44269502162933f;  // log2(e), whose next 24 bits follow
  const float rest = fma(bounded, 1.92596299112662e-8f, fma(bounded, 1.44269502162933f, -whole));
  const float y = exp2(whole);
  return fma(y, rest * 0.693147180559945f, y);
}

TW_DEVICE float sigmoid(float x) { return reciprocal(1.0f + exp(-x)); }

// Relative error below 3e-7.
TW_DEVICE float tanh(float x) {
  const float z = x * x, magnitude = magnitude_of(x);
  const float near = fma(x * z,
                         horner(z, -3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f, 2.06390887954e-2f,
                                -5.70498872745e-3f),
                         x);
  const float e = exp(-2.0f * magnitude);
  const float far = (1.0f - e) * reciprocal(1.0f + e);
  return magnitude < 0.625f ? near : float_of((bits_of(far) & 0x7fffffffu) | (bits_of(x) & 0x80000000u));
}

// e^x - 1, relative error below 6e-7 for x <= 0: Taylor to degree 8 near zero, where the subtraction would cancel.
TW_DEVICE float expm1_below_zero(float x) {
  const float near =
      x * horner(x, 1.0f, 1.0f / 2, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040, 1.0f / 40320);
  return x > -0.5f ? near : exp(x) - 1.0f;
}

// ln(1 + t), relative error below 6e-7 for t from 0 to 1: 2 atanh(t / (2 + t)), whose argument is at most 1/3.
TW_DEVICE float log1p_unit(float t) {
  const float s = t * reciprocal(2.0f + t), z = s * s;
  return 2.0f * s * horner(z, 1.0f, 1.0f / 3, 1.0f / 5, 1.0f / 7, 1.0f / 9, 1.0f / 11, 1.0f / 13);
}

// Absolute error below 6e-7: Abramowitz and Stegun, 7.1.26 (1.5e-7), and rounding. Half the instructions of the
// rational form that CPUs use, which is what a fused GELU costs.
TW_DEVICE float erf(float x) {
  const float magnitude = magnitude_of(x);
  const float t = reciprocal(fma(0.3275911f, magnitude, 1.0f));
  const float p = horner(t, 0.254829592f, -0.284496736f, 1.421413741f, -1.453152027f, 1.061405429f);
  const float y = fma(-t * p, exp2(-1.44269504f * magnitude * magnitude), 1.0f);
  return float_of((bits_of(y) & 0x7fffffffu) | (bits_of(x) & 0x80000000u));
}

template <Binary kOp>
TW_DEVICE float apply_binary(float x, float d) {
  if constexpr (kOp == Binary::Add || kOp == Binary::MultiDAdd) return x + d;
  else if constexpr (kOp == Binary::Multiply || kOp == Binary::MultiDMultiply) return x * d;
  else return x;
}

// lo and hi are the bounds of Clamp; lo is the slope of LeakyRelu below zero and the factor of Elu there.
template <Unary kOp>
TW_DEVICE float apply_unary(float x, float lo, float hi) {
  if constexpr (kOp == Unary::Relu) return x < 0.0f ? 0.0f : x;
  else if constexpr (kOp == Unary::Gelu) return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
  else if constexpr (kOp == Unary::FastGelu)  // (1 + tanh(u)) / 2 is the sigmoid of 2u
    return x * sigmoid(1.5957691216057308f * fma(0.044715f * x * x, x, x));
  else if constexpr (kOp == Unary::Silu) return x * sigmoid(x);
  else if constexpr (kOp == Unary::Sigmoid) return sigmoid(x);
  else if constexpr (kOp == Unary::Tanh) return tanh(x);
  else if constexpr (kOp == Unary::HardSwish) return x * clamp(x + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f);
  else if constexpr (kOp == Unary::Clamp) return clamp(x, lo, hi);
  else if constexpr (kOp == Unary::LeakyRelu) return x < 0.0f ? lo * x : x;
  else if constexpr (kOp == Unary::Elu) return x < 0.0f ? lo * expm1_below_zero(x) : x;
  else if constexpr (kOp == Unary::Softplus) return (x < 0.0f ? 0.0f : x) + log1p_unit(exp(-magnitude_of(x)));
  else if constexpr (kOp == Unary::Mish) {
    const float e = exp(x > 20.0f ? 20.0f : x), n = e * (e + 2.0f);
    return x * (n * reciprocal(n + 2.0f));
  }
  else return x;
}

}  // namespace tw::gpu

// The fused element-wise steps, on one vector of fp32. Used by the epilogue of every operation.
#pragma once
#include "tilewright/core/math.hpp"
#include "tilewright/core/options.hpp"

TW_NAMESPACE_BEGIN

template <Binary kOp>
TW_INLINE f32v apply_binary(f32v x, f32v d) {
  if constexpr (kOp == Binary::Add || kOp == Binary::MultiDAdd) return x + d;
  else if constexpr (kOp == Binary::Multiply || kOp == Binary::MultiDMultiply) return x * d;
  else return x;
}

TW_INLINE f32v sigmoid(f32v x) { return 1.0f / (1.0f + exp(-x)); }

// Gelu: 0.5 x (1 + erf(x / sqrt 2)), absolute error below 1.5e-6 where x < 0, |x| / 2 times that of erf (worst near
// x = -5.6, where erf is 1 - 2e-8). FastGelu: the tanh form, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). lo and hi are the bounds of Clamp; lo is the slope of LeakyRelu below
// zero and the factor of Elu there. Mish: x tanh(softplus(x)), of which tanh(ln(1 + e)) = n / (n + 2), n = e (e + 2). A
// NaN passes through every step.
template <Unary kOp>
TW_INLINE f32v apply_unary(f32v x, float lo, float hi) {
  if constexpr (kOp == Unary::Relu) return select(x < 0.0f, f32v{}, x);
  else if constexpr (kOp == Unary::Gelu) return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
  else if constexpr (kOp == Unary::FastGelu)
    return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  else if constexpr (kOp == Unary::Silu) return x * sigmoid(x);
  else if constexpr (kOp == Unary::Sigmoid) return sigmoid(x);
  else if constexpr (kOp == Unary::Tanh) return tanh(x);
  else if constexpr (kOp == Unary::HardSwish) return x * clamp(x + 3.0f, f32v{}, splat(6.0f)) * (1.0f / 6.0f);
  else if constexpr (kOp == Unary::Clamp) return clamp(x, splat(lo), splat(hi));
  else if constexpr (kOp == Unary::LeakyRelu) return select(x < 0.0f, lo * x, x);
  else if constexpr (kOp == Unary::Elu) return select(x < 0.0f, lo * expm1_below_zero(x), x);
  else if constexpr (kOp == Unary::Softplus)
    return select(x < 0.0f, f32v{}, x) + log1p_unit(exp(-abs(x)));
  else if constexpr (kOp == Unary::Mish) {
    const f32v e = exp(select(x > 20.0f, splat(20.0f), x)), n = e * (e + 2.0f);
    return x * (n / (n + 2.0f));
  }
  else return x;
}

TW_NAMESPACE_END

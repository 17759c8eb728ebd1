// Results of experts that are made of sums: the activation of a gate, and fp8 with a factor for each row and block of
// columns. Sums are rows of fp32 in the workspace.
#pragma once
#include "tilewright/core/elementwise.hpp"
#include "tilewright/core/moe_rows.hpp"
#include "tilewright/core/types.hpp"

TW_NAMESPACE_BEGIN

template <class Results>
struct MoeFinish {
  using Result = typename Results::Result;
  static_assert(kMoeBlock % kLanes == 0 && kMoeBlock % kMoeTurn == 0, "whole vectors and turns");

  // One row of `columns` results. Factors, if there are any, lie `apart` elements from each other.
  static void row(const float* sums, int64_t columns, char* to, float* scales, int64_t apart) {
    for (int64_t j = 0; j < columns; j += kMoeBlock) {
      const int64_t count = min_of(columns - j, kMoeBlock);
      alignas(64) float values[kMoeBlock] = {};
      if constexpr (Results::gated) gate(sums + 2 * j, count, values);
      else __builtin_memcpy(values, sums + j, (size_t)count * sizeof(float));
      float factor = 1.0f;
      if constexpr (Results::quantised) {
        float most = kMoeLeastRange;
        for (int64_t i = 0; i < count; i++) {
          const float magnitude = values[i] < 0.0f ? -values[i] : values[i];
          most = magnitude > most ? magnitude : most;
        }
        scales[j / kMoeBlock * apart] = most / kMoeLargest;
        factor = kMoeLargest / most;
      }
      for (int64_t i = 0; i < count; i += kLanes)
        store_f32_partial<Result>(to + (j + i) * size_of<Result>, load_as<f32v>(values + i) * factor, count - i);
    }
  }

 private:
  // `count` values, a multiple of a turn.
  static void gate(const float* sums, int64_t count, float* values) {
    alignas(64) float gates[kMoeBlock] = {};
    for (int64_t i = 0; i < count; i += kMoeTurn) {
      __builtin_memcpy(gates + i, sums + 2 * i, kMoeTurn * sizeof(float));
      __builtin_memcpy(values + i, sums + 2 * i + kMoeTurn, kMoeTurn * sizeof(float));
    }
    for (int64_t i = 0; i < count; i += kLanes)
      store_as(values + i, apply_unary<Unary::Silu>(load_as<f32v>(gates + i), 0.0f, 0.0f) * load_as<f32v>(values + i));
  }
};

TW_NAMESPACE_END

// 16-bit values of two lines side by side, as instructions that add products of pairs take them: of 2 L channels, a
// vector has four of every eight (shuffles stay within 128 bits).
#pragma once
#include "tilewright/core/vector.hpp"

TW_NAMESPACE_BEGIN

// Four of every eight channels from kFrom (0 or 4) on.
template <int kFrom, int... kI>
TW_INLINE u32v interleave(u16v a, u16v b, Sequence<kI...>) {
  return (u32v)__builtin_shufflevector(a, b, (kI / 8 * 8 + kFrom + kI % 8 / 2 + kI % 2 * 2 * kLanes)...);
}

// Channels in their order again: L of them from kHalf * L on, or all as 16 bits each.
template <int kHalf, int... kI>
TW_INLINE f32v in_order(f32v low, f32v high, Sequence<kI...>) {
  return __builtin_shufflevector(low, high, (kHalf * kLanes / 2 + kI / 8 * 4 + kI % 4 + kI / 4 % 2 * kLanes)...);
}
template <int... kI>
TW_INLINE u16v in_order(u16v low_and_high, Sequence<kI...>) {
  return __builtin_shufflevector(low_and_high, low_and_high, (kI / 8 * 4 + kI % 4 + kI / 4 % 2 * kLanes)...);
}

TW_NAMESPACE_END

// Results of a convolution without a product (cpu/conv/direct/conv.hpp): its sums are stored as they are, if
// nothing else is wanted, or by the epilogue.
#pragma once
#include "tilewright/cpu/conv/direct/view.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct DirectResults {
  using C = typename Config::C;
  using Dot = typename KeptFor<typename Config::A, typename Config::B>::Dot;
  using V = typename Dot::accumulator;
  using Accumulator = typename Dot::scalar;
  using Out = Epilogue<Config, Dot, LineRows<Config>>;
  static constexpr int L = kLanes;
  static constexpr bool plain = Out::plain && !Config::accumulate;

  // `pixels` of a line from `number` on, `count` channels from `column` on of so many vectors.
  static TW_NOINLINE void store(const LineOutput& out, int64_t number, int64_t column, int64_t pixels, int64_t count,
                                int64_t vectors, const V* sums) {
    const float alpha = (float)out.problem->alpha;
    const int64_t lanes = vectors * L, step = out.ld * size_of<C>;
    char* to = out.data + column * size_of<C>;
    if constexpr (plain && is_same<C, fp32>) {
      if (count == lanes) {
        for (int64_t p = 0; p < pixels; p++, to += step)
          for (int64_t i = 0; i < vectors; i++) store_as(to + i * kVectorBytes, widened(*sums++) * alpha);
        return;
      }
    }
#if TW_PAIRS_OF_BF16
    if constexpr (plain && is_same<C, bf16> && is_same<Dot, DotBf16>) {
      // No sum of products of pairs is subnormal, and so all of them are rounded as elsewhere.
      if (count == lanes && alpha == 1.0f) {
        constexpr int64_t kBytes = kVectorBytes / 2;
        if (vectors == 1) {
          for (int64_t p = 0; p < pixels; p += 2, sums += 2, to += 2 * step) {
            const u16v x = narrow_to_bf16(sums[0], sums[1]);
            store_as(to, half_of<0>(x, MakeSequence<L>::type{}));
            if (p + 1 < pixels) store_as(to + step, half_of<L>(x, MakeSequence<L>::type{}));
          }
        } else {
          for (int64_t p = 0; p < pixels; p++, to += step)
            for (int64_t i = 0; i < vectors; i += 2, sums += 2)
              store_as(to + i * kBytes, narrow_to_bf16(sums[0], sums[1]));
        }
        return;
      }
    }
#endif
    const Accumulator* const kept = (const Accumulator*)sums;
    if constexpr (plain && is_same<C, int32>) {
      if (alpha == 1.0f) {  // integers as they are
        for (int64_t p = 0; p < pixels; p++, to += step)
          __builtin_memcpy(to, kept + p * lanes, (size_t)count * 4);
        return;
      }
    }
    Out::store(out, number, column, pixels, count, kept, lanes, nullptr);
  }

 private:
  template <int kFirst, int... kI>
  static TW_INLINE u16_half half_of(u16v x, Sequence<kI...>) {
    return __builtin_shufflevector(x, x, (kFirst + kI)...);
  }
  static TW_INLINE f32v widened(V sum) {
    if constexpr (Dot::is_float) return sum;
    else return __builtin_convertvector(sum, f32v);
  }
};

TW_NAMESPACE_END

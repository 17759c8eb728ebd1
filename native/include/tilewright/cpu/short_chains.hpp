// Sums of fp32 that are made of short chains: one chain over thousands of terms would lose what its operands have of
// precision. Where operands have fewer bits than sums, nothing of that shows in a result, and chains stay whole.
//
//   ShortChains<V, 24, is_same<E, fp32>> chains;   // beside `V sums[24]`, which begin at zero
//   ... chains.passed(sums, 3);                    // after every few terms of each sum
//   chains.end(sums);
#pragma once
#include "tilewright/core/types.hpp"

TW_NAMESPACE_BEGIN

template <class V, int kCount, bool kWanted>
struct ShortChains {
  TW_INLINE void passed(V*, int64_t) {}
  TW_INLINE void end(V*) {}
};
template <class V, int kCount>
struct ShortChains<V, kCount, true> {
  static constexpr int64_t kTerms = 96;  // of a chain, about: putting it aside costs a thirtieth of it
  alignas(64) V wholes[kCount];  // in memory: the registers are for the sums
  int64_t left = kTerms;
  bool any = false;

  TW_INLINE void passed(V* sums, int64_t terms) {
    if ((left -= terms) > 0) return;
    left = kTerms;
    put_aside(sums);
  }
  TW_INLINE void end(V* sums) {
    if (!any) return;
    TW_UNROLL
    for (int i = 0; i < kCount; i++) sums[i] += wholes[i];
  }

 private:
  TW_INLINE void put_aside(V* sums) {
    if (!any) {
      TW_UNROLL
      for (int i = 0; i < kCount; i++) wholes[i] = V{};
      __asm__ volatile("" : : "r"(wholes) : "memory");
    }
    any = true;
    TW_UNROLL
    for (int i = 0; i < kCount; i++) wholes[i] += sums[i], sums[i] = V{};
  }
};

TW_NAMESPACE_END

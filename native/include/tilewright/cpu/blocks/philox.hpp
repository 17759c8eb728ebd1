// The random bytes of dropout (core/philox.hpp), a vector of calls at a time.
#pragma once
#include "tilewright/core/philox.hpp"
#include "tilewright/core/vector.hpp"

TW_NAMESPACE_BEGIN

// The high and low words of x * constant, lane by lane.
TW_INLINE void multiply_wide(u32v x, uint32_t constant, u32v& high, u32v& low) {
  typedef uint64_t u64v __attribute__((vector_size(kVectorBytes)));
  const u64v even = ((u64v)x & 0xffffffffu) * constant, odd = ((u64v)x >> 32) * constant;
  low = x * constant;
  high = (u32v)((even >> 32) | (odd & ~(uint64_t)0xffffffffu));
}

// The bytes of columns [column, column + count) of one row, both multiples of 64 or not: `to` begins with that of
// column / 64 * 64, and whole groups of 64 are written. Returns where `column` lies.
TW_NOINLINE inline const uint8_t* fmha_random_row(FmhaSeed seed, int64_t head, int64_t row, int64_t column,
                                                  int64_t count, uint8_t* to) {
  const int64_t first = column >> 6, last = (column + count + 63) >> 6;
  for (int64_t group = first * 4; group < last * 4; group += kLanes) {
    u32v c0, c1 = splat_bits((uint32_t)row), c2 = splat_bits((uint32_t)head), c3 = splat_bits(seed.offset);
    TW_UNROLL
    for (int i = 0; i < kLanes; i++) c0[i] = (uint32_t)(group + i);
    uint32_t key0 = seed.low, key1 = seed.high;
    for (int round = 0; round < 10; round++) {
      u32v high0, low0, high1, low1;
      multiply_wide(c0, 0xD2511F53u, high0, low0);
      multiply_wide(c2, 0xCD9E8D57u, high1, low1);
      c0 = high1 ^ c1 ^ key0, c1 = low1, c2 = high0 ^ c3 ^ key1, c3 = low0;
      key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    // Halves of word w of the calls 4*q to 4*q + 3 are the bytes of columns 64*q + 16*w to + 7, and the next 8.
    const u32v words[4] = {c0, c1, c2, c3};
    const int64_t there = min_of(last * 4 - group, kLanes);
    for (int w = 0; w < 4; w++) {
      uint16_t low[kLanes], high[kLanes];
      store_low_u16(low, words[w]);
      store_low_u16(high, words[w] >> 16);
      for (int64_t q = 0; q < there / 4; q++) {
        uint8_t* const at = to + (group / 4 - first + q) * 64 + w * 16;
        __builtin_memcpy(at, low + q * 4, 8);
        __builtin_memcpy(at + 8, high + q * 4, 8);
      }
    }
  }
  return to + (column & 63);
}

TW_NAMESPACE_END

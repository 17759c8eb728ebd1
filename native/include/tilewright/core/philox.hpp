// Random bytes of dropout: Philox4x32-10 (Salmon et al., SC 2011), a function of (seed, offset, head, row, column) and
// of nothing else, so that every tiling, every device and the backward pass see the same bytes.
//
// One call gives the 16 bytes of 16 columns: key = seed, counter = ((j>>6)*4 + ((j&7)>>1), i, b*heads_q + h, offset);
// column j has byte ((j>>3)&7)*2 + (j&1) of them, little-endian in w[0] to w[3]. That is what one thread of a fragment
// of 16 x 8 owns in 64 columns. A probability is dropped where its byte is below tw_fmha_args::drop_below.
#pragma once
#include "tilewright/core/fmha_item.hpp"

namespace tw {

struct PhiloxWords {
  uint32_t w[4];
};

TW_EVERYWHERE PhiloxWords philox4x32(uint32_t key0, uint32_t key1, PhiloxWords counter) {
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = (uint64_t)0xD2511F53u * counter.w[0], product1 = (uint64_t)0xCD9E8D57u * counter.w[2];
    counter = {{(uint32_t)(product1 >> 32) ^ counter.w[1] ^ key0, (uint32_t)product1,
                (uint32_t)(product0 >> 32) ^ counter.w[3] ^ key1, (uint32_t)product0}};
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return counter;
}

struct FmhaSeed {
  uint32_t low, high, offset;
};

TW_EVERYWHERE FmhaSeed fmha_seed(const tw_fmha_args& args) {
  if (args.rng) return {(uint32_t)args.rng[0], (uint32_t)args.rng[1], (uint32_t)args.rng[2]};
  return {(uint32_t)args.seed, (uint32_t)((uint64_t)args.seed >> 32), (uint32_t)args.offset};
}

// The 16 bytes of the columns that share `group` = (j>>6)*4 + ((j&7)>>1). head: b*heads_q + h.
TW_EVERYWHERE PhiloxWords fmha_random(FmhaSeed seed, int64_t head, int64_t row, int64_t group) {
  return philox4x32(seed.low, seed.high, {{(uint32_t)group, (uint32_t)row, (uint32_t)head, seed.offset}});
}

TW_EVERYWHERE uint32_t fmha_random_byte(FmhaSeed seed, int64_t head, int64_t row, int64_t column) {
  const PhiloxWords words = fmha_random(seed, head, row, (column >> 6) * 4 + ((column & 7) >> 1));
  const int byte = (int)((column >> 3) & 7) * 2 + (int)(column & 1);
  return words.w[byte >> 2] >> (8 * (byte & 3)) & 255u;
}

}  // namespace tw

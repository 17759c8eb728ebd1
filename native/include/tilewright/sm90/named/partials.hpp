// Partial tiles (sm90/partials.hpp) of sums in named registers.
#pragma once
#include "tilewright/sm90/named/sums.hpp"
#include "tilewright/sm90/partials.hpp"

namespace tw::sm90::named {

// A slot holds one warpgroup's sums, the registers by fours: 16 bytes a thread, those of all threads side by side.
// `fours` calls f(the first of four registers, their place in the slot), for those of a chunk of Plan's sums.
constexpr int kFourBytes = kWarpgroup * 16;
template <class Plan, int kWhich, class F>
TW_SM90 void fours(const F& f) {
  using Sums = SumsOf<Plan>;
  constexpr int kBegin = kWhich / Sums::chunks * (Plan::columns / 2) + kWhich % Sums::chunks * kChunk;
#pragma unroll
  for (int i = 0; i < Sums::size(kWhich); i += 4) f(i, (kBegin + i) / 4);
}

template <class Plan>
TW_SM90 void write_partial(char* slot, int thread) {
  for_each_index<0, Plan::repeats * SumsOf<Plan>::chunks>([&](auto which) {
    uint32_t x[kChunk];
    SumsOf<Plan>::template read_chunk<which.value>(x);
    fours<Plan, which.value>([&](int i, int at) {
      gpu::store_coherent<4>(slot + at * kFourBytes + thread * 16, gpu::Words<4>{x[i], x[i + 1], x[i + 2], x[i + 3]});
    });
  });
}

// The sums of all parts, added in their order. Several chunks, or parts, are on their way at once.
template <class Plan, class SlotOf>
TW_SM90 void add_partials(const SlotOf& slot_of, int parts, int thread) {
  using Sums = SumsOf<Plan>;
  constexpr int kChunks = Plan::repeats * SumsOf<Plan>::chunks, kBatch = kChunks < 4 ? kChunks : 4, kParts = 4 / kBatch;
  Sums::template clear<0, kChunks>();
#pragma unroll 1
  for (int part = 0; part < parts; part += kParts) {
    for_each_index<0, (kChunks + kBatch - 1) / kBatch>([&](auto batch) {
      constexpr int kBegin = batch.value * kBatch, kEnd = kBegin + kBatch < kChunks ? kBegin + kBatch : kChunks;
      uint32_t x[kParts][kBatch][kChunk];
      for_each_index<0, kParts>([&](auto p) {
        if (p.value == 0 || part + p.value < parts)
          for_each_index<kBegin, kEnd>([&](auto which) {
            fours<Plan, which.value>([&](int i, int at) {
              const char* const from = slot_of(part + p.value) + at * kFourBytes + thread * 16;
              const auto words = gpu::load_coherent<4>(from);
#pragma unroll
              for (int l = 0; l < 4; l++) x[p.value][which.value - kBegin][i + l] = words.w[l];
            });
          });
      });
      for_each_index<0, kParts>([&](auto p) {
        if (p.value == 0 || part + p.value < parts)
          for_each_index<kBegin, kEnd>(
              [&](auto which) { Sums::template add_words<which.value>(x[p.value][which.value - kBegin]); });
      });
    });
  }
}

// The same within a cluster, of which each workgroup has one part. `send_sums`: a warpgroup's sums go to slot `part` -
// 1 of workgroup 0, whose barrier expects them. `gather_sums`: workgroup 0 adds the slots to its own.
template <class Plan>
TW_SM90 void send_sums(uint32_t slot, uint32_t barrier, int thread) {
  const uint32_t to = shared_address_in(slot, 0) + thread * 16, at_barrier = shared_address_in(barrier, 0);
  for_each_index<0, Plan::repeats * SumsOf<Plan>::chunks>([&](auto which) {
    uint32_t x[kChunk];
    SumsOf<Plan>::template read_chunk<which.value>(x);
    fours<Plan, which.value>([&](int i, int at) {
      send_words(to + at * kFourBytes, at_barrier, x[i], x[i + 1], x[i + 2], x[i + 3]);
    });
  });
}
template <class Plan>
TW_SM90 void gather_sums(uint32_t slots, int slot_bytes, int count, uint32_t barrier, int thread) {
  wait(barrier, 0);
#pragma unroll 1
  for (int slot = 0; slot < count; slot++, slots += slot_bytes)
    for_each_index<0, Plan::repeats * SumsOf<Plan>::chunks>([&](auto which) {
      uint32_t x[kChunk];
      fours<Plan, which.value>([&](int i, int at) {
        const gpu::Words<4> words = gpu::load_shared<4>(slots + at * kFourBytes + thread * 16);
#pragma unroll
        for (int l = 0; l < 4; l++) x[i + l] = words.w[l];
      });
      SumsOf<Plan>::template add_words<which.value>(x);
    });
}

}  // namespace tw::sm90::named

// Partial tiles of split-K and Stream-K: every part leaves its sums in the workspace, and whoever comes last adds them
// in the order of the parts. The result does not depend on who that is. Or, within a cluster, the first part gets them
// all.
#pragma once
#include "tilewright/gpu/platform.hpp"
#include "tilewright/sm90/mbarrier.hpp"

namespace tw::sm90 {

TW_SM90 uint32_t bits(float x) { return gpu::bits_of(x); }
TW_SM90 uint32_t bits(int32_t x) { return (uint32_t)x; }
TW_SM90 void from_bits(float& x, uint32_t from) { x = gpu::float_of(from); }
TW_SM90 void from_bits(int32_t& x, uint32_t from) { x = (int32_t)from; }

// One warpgroup's sums, kCount per thread (a multiple of 4), in a slot: registers by fours, 16 bytes a thread.
template <class T, int kCount>
TW_SM90 void write_partial(T* slot, const T (&sums)[kCount], int thread) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
    gpu::store_coherent<4>(slot + (i / 4 * kWarpgroup + thread) * 4,
                           gpu::Words<4>{bits(sums[i]), bits(sums[i + 1]), bits(sums[i + 2]), bits(sums[i + 3])});
}

// The sums of all parts, added in their order. Several parts are on their way at once.
template <class T, int kCount, class SlotOf>
TW_SM90 void add_partials(T (&sums)[kCount], const SlotOf& slot_of, int parts, int thread) {
  constexpr int kBatch = kCount >= 64 ? 64 : kCount, kParts = kCount >= 64 ? 1 : 64 / kCount;
#pragma unroll
  for (int i = 0; i < kCount; i++) sums[i] = 0;
#pragma unroll 1
  for (int part = 0; part < parts; part += kParts) {
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kBatch) {
      gpu::Words<4> loaded[kParts][kBatch / 4];
#pragma unroll
      for (int p = 0; p < kParts; p++)
        if (p == 0 || part + p < parts)
#pragma unroll
          for (int i = 0; i < kBatch / 4 && begin + i * 4 < kCount; i++)
            loaded[p][i] =
                gpu::load_coherent<4>(slot_of(part + p) + ((begin / 4 + i) * kWarpgroup + thread) * 4);
#pragma unroll
      for (int p = 0; p < kParts; p++)
        if (p == 0 || part + p < parts)
#pragma unroll
          for (int i = 0; i < kBatch && begin + i < kCount; i++) {
            T value;
            from_bits(value, loaded[p][i / 4].w[i % 4]);
            sums[begin + i] += value;
          }
    }
  }
}

// The same within a cluster, of which each workgroup has one part. `send_sums`: a warpgroup's sums go to slot `part` -
// 1 of workgroup 0, whose barrier expects them. `gather_sums`: workgroup 0 adds the slots to its own.
template <class T, int kCount>
TW_SM90 void send_sums(const T (&sums)[kCount], uint32_t slot, uint32_t barrier, int thread) {
  const uint32_t to = shared_address_in(slot, 0) + thread * 16, at = shared_address_in(barrier, 0);
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
    send_words(to + i / 4 * (kWarpgroup * 16), at, bits(sums[i]), bits(sums[i + 1]), bits(sums[i + 2]),
               bits(sums[i + 3]));
}
template <class T, int kCount>
TW_SM90 void gather_sums(T (&sums)[kCount], uint32_t slots, int slot_bytes, int count, uint32_t barrier, int thread) {
  wait(barrier, 0);
#pragma unroll 1
  for (int slot = 0; slot < count; slot++, slots += slot_bytes) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const gpu::Words<4> words = gpu::load_shared<4>(slots + (i / 4 * kWarpgroup + thread) * 16);
#pragma unroll
      for (int l = 0; l < 4; l++) {
        T value;
        from_bits(value, words.w[l]);
        sums[i + l] += value;
      }
    }
  }
}

// Counts the calling warpgroup as arrived at its tile; true for the last of `parts`. A counter serves kConsumers
// warpgroups, each in its own bits, and is zero again after the last arrival of all. `flag`: a word of shared memory of
// this warpgroup, `barrier` its named barrier. What the warpgroup wrote before is visible to the last one's coherent
// loads: the barriers order the threads, one thread's atomic operation the warpgroups.
template <int kConsumers>
TW_SM90 bool arrive_last(uint32_t* counter, int parts, int consumer, uint32_t flag, int barrier, int thread) {
  constexpr int kBits = 32 / kConsumers;
  const int shift = consumer * kBits;
  join_barrier(barrier, kWarpgroup);
  if (thread == 0) {
    const uint32_t mask = kBits == 32 ? ~0u : (1u << (kBits % 32)) - 1;
    uint32_t before, last;
    asm volatile("atom.global.acq_rel.gpu.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(1u << shift)
                 : "memory");
    last = ((before >> shift) & mask) == (uint32_t)parts - 1;
    if (last)
      asm volatile("red.global.relaxed.gpu.add.u32 [%0], %1;" ::"l"(counter), "r"(0u - ((uint32_t)parts << shift))
                   : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(flag), "r"(last) : "memory");
  }
  join_barrier(barrier, kWarpgroup);
  uint32_t last;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(last) : "r"(flag) : "memory");
  return __shfl_sync(0xffffffffu, last, 0) != 0;  // tells the compiler that the warp agrees
}

}  // namespace tw::sm90

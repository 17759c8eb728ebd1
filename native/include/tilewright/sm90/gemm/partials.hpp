// Partial tiles of split-K and Stream-K: every part leaves its sums in the workspace, and whoever comes last adds them
// in the order of the parts. The result does not depend on who that is. Or, within a cluster, the first part gets them
// all.
#pragma once
#include "tilewright/sm90/blocks/mbarrier.hpp"
#include "tilewright/sm90/gemm/accumulators.hpp"

namespace tw::sm90 {

// A slot holds one warpgroup's sums (Accumulators::place), each chunk of them moved by one statement.
template <class Plan>
constexpr int kAccumulatorChunks = Plan::repeats * AccumulatorsOf<Plan>::chunks;

template <class Plan>
TW_SM90 void write_partial(char* slot, int thread) {
  char* const to = slot + thread * 16;
  for_each_index<0, kAccumulatorChunks<Plan>>([&](auto q) { AccumulatorsOf<Plan>::template leave<q.value>(to); });
}

// The sums of all parts, added in their order. Several chunks, or parts, are on their way at once.
template <class Plan, class SlotOf>
TW_SM90 void add_partials(const SlotOf& slot_of, int parts, int thread) {
  using Accumulators = AccumulatorsOf<Plan>;
  constexpr int kChunks = kAccumulatorChunks<Plan>, kBatch = kChunks < kTakenChunks ? kChunks : kTakenChunks;
  constexpr int kParts = kTakenChunks / kBatch;
  Accumulators::template clear<0, kChunks>();
#pragma unroll 1
  for (int part = 0; part < parts; part += kParts)
    for_each_index<0, (kChunks + kBatch - 1) / kBatch>([&](auto batch) {
      constexpr int kBegin = batch.value * kBatch, kEnd = kBegin + kBatch < kChunks ? kBegin + kBatch : kChunks;
      for_each_index<0, kParts>([&](auto p) {
        constexpr int kAt = p.value * kBatch - kBegin;
        if (p.value > 0 && part + p.value >= parts) return;
        const char* const from = slot_of(part + p.value) + thread * 16;
        for_each_index<kBegin, kEnd>(
            [&](auto q) { Accumulators::template take<q.value, kAt + q.value>(from); });
      });
      for_each_index<0, kParts>([&](auto p) {
        constexpr int kAt = p.value * kBatch - kBegin;
        if (p.value > 0 && part + p.value >= parts) return;
        for_each_index<kBegin, kEnd>(
            [&](auto q) { Accumulators::template add_taken<q.value, kAt + q.value>(); });
      });
    });
}

// The same within a cluster, of which each workgroup has one part. `send_sums`: a warpgroup's sums go to slot `part` -
// 1 of workgroup 0, whose barrier expects them. `gather_sums`: workgroup 0 adds the slots to its own.
template <class Plan>
TW_SM90 void send_sums(uint32_t slot, uint32_t barrier, int thread) {
  const uint32_t to = shared_address_in(slot, 0) + thread * 16, at_barrier = shared_address_in(barrier, 0);
  for_each_index<0, kAccumulatorChunks<Plan>>(
      [&](auto q) { AccumulatorsOf<Plan>::template send<q.value>(to, at_barrier); });
}
template <class Plan>
TW_SM90 void gather_sums(uint32_t slots, int slot_bytes, int count, uint32_t barrier, int thread) {
  wait(barrier, 0);
  slots += thread * 16;
#pragma unroll 1
  for (int slot = 0; slot < count; slot++, slots += slot_bytes)
    for_each_index<0, kAccumulatorChunks<Plan>>([&](auto q) {
      AccumulatorsOf<Plan>::template take_shared<q.value, q.value % kTakenChunks>(slots);
      AccumulatorsOf<Plan>::template add_taken<q.value, q.value % kTakenChunks>();
    });
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

// The order of a main loop's instructions on AMD GPUs. A wave issues in order, one instruction in four cycles at best;
// a matrix instruction keeps its unit busy for 16 to 64 cycles, in which others are issued for free as long as they are
// few between two of them. So reads, writes and loads are dealt out evenly between the matrix instructions.
//
// The compiler's scheduler takes such an order as a list of groups, which hold for the rest of the basic block.
#pragma once
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

constexpr int kScheduleMatrix = 0x008, kScheduleFetch = 0x020, kScheduleRead = 0x100, kScheduleWrite = 0x200;

// `count` instructions of one kind.
template <int kKind>
TW_DEVICE void schedule(int count) {
  TW_UNROLL
  for (int i = 0; i < count; i++) __builtin_amdgcn_sched_group_barrier(kKind, 1, 0);
}

// Events between matrix instructions: reads from LDS, then writes to LDS and fetches from global memory in turn.
struct Events {
  int reads, writes, fetches;
  constexpr int count() const { return reads + writes + fetches; }
};

// `products` matrix instructions, the events dealt out among the first `among` of them.
TW_DEVICE void schedule_slice(int products, int among, const Events& events) {
  const int total = events.count(), pairs = events.count() - events.reads;
  int writes = 0, fetches = 0;
  TW_UNROLL
  for (int p = 0; p < products; p++) {
    schedule<kScheduleMatrix>(1);
    const int first = p < among ? p * total / among : total, last = p < among ? (p + 1) * total / among : total;
    TW_UNROLL
    for (int e = first; e < last; e++) {
      if (e < events.reads) {
        schedule<kScheduleRead>(1);
      } else {
        // So many writes should have been made by now.
        const int due = ceil_div((e - events.reads + 1) * events.writes, max_of(pairs, 1));
        if (writes < due) schedule<kScheduleWrite>(1), writes++;
        else schedule<kScheduleFetch>(1), fetches++;
      }
    }
  }
}

// The part of `total` events that falls to part `part` of `parts`.
constexpr int share_of(int total, int part, int parts) { return total * (part + 1) / parts - total * part / parts; }

}  // namespace tw::gpu

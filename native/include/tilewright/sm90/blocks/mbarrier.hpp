// Barriers in shared memory that count arrivals and bytes (mbarrier), and the state of a ring of buffers guarded by
// them. Barriers are named by their shared-memory address.
#pragma once
#include "tilewright/sm90/blocks/cluster.hpp"

namespace tw::sm90 {

TW_SM90 void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the cluster; then synchronise workgroup or cluster.
TW_SM90 void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

TW_SM90 void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same at a barrier of any workgroup of the cluster, by its address in the cluster's window. Orders nothing but
// what the tensor cores and the copy engine have completed: a release at cluster scope would wait for all of the
// thread's memory accesses each time.
TW_SM90 void arrive_mapped(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the phase end only after `bytes` more have been copied in.
TW_SM90 void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of the given parity has ended. A fresh barrier is in phase 0: waiting for parity 1 returns at
// once.
TW_SM90 void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nTW_WAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra TW_DONE_%=;\nbra TW_WAIT_%=;\nTW_DONE_%=:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A position in a ring of kStages buffers: stage, and the parity of the round.
template <int kStages>
struct RingState {
  int stage = 0;
  uint32_t parity = 0;

  TW_SM90 void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  TW_SM90 void skip(int count) {
    const int to = stage + count;
    parity ^= (uint32_t)(to / kStages) & 1;
    stage = to % kStages;
  }
};

// The two barriers of each stage: `full` is what consumers wait for, `empty` what the producer waits for. `base` is the
// address of 2 * kStages barriers.
template <int kStages>
struct RingBarriers {
  static constexpr int bytes = 2 * kStages * 8;
  uint32_t base;

  TW_SM90 uint32_t full(int stage) const { return base + stage * 8; }
  TW_SM90 uint32_t empty(int stage) const { return base + (kStages + stage) * 8; }
  // One thread. Producers arrive once per stage (with the bytes to expect), consumers `releases` times.
  TW_SM90 void init(int releases) const {
    for (int stage = 0; stage < kStages; stage++) {
      init_barrier(full(stage), 1);
      init_barrier(empty(stage), releases);
    }
    fence_barrier_init();
  }
  TW_SM90 void wait_full(RingState<kStages> at) const { wait(full(at.stage), at.parity); }
  TW_SM90 void wait_empty(RingState<kStages> at) const { wait(empty(at.stage), at.parity ^ 1); }
};

}  // namespace tw::sm90

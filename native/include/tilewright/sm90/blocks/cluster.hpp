// Clusters of workgroups that see each other's shared memory.
#pragma once
#include "tilewright/sm90/blocks/base.hpp"

namespace tw::sm90 {

// The calling workgroup's number in its cluster.
TW_SM90 uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address, in the window of the whole cluster, of what lies at `address` in workgroup `rank`.
TW_SM90 uint32_t shared_address_in(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// A barrier over all threads of all workgroups of the cluster, in two halves. It orders no ordinary memory accesses:
// initialised barriers have their own fence. Before a workgroup ends, its peers must be done with its memory.
TW_SM90 void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
TW_SM90 void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
TW_SM90 void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Writes 16 bytes into the memory of another workgroup of the cluster; its barrier counts them. Both are addresses in
// the cluster's window, of one workgroup. Nobody has to wait or fence on this side.
TW_SM90 void send_words(uint32_t to, uint32_t barrier, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
      "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// A cluster of kM x kN workgroups over neighbouring tiles, the rank running along m first. Those of one row of tiles
// (equal m) share A, those of one column share B.
template <int kM, int kN>
struct ClusterShape {
  static constexpr int m = kM, n = kN, size = kM * kN, peers = kM + kN - 1;  // peers: row and column, self once
  static_assert(size <= 8, "portable clusters have at most 8 workgroups");

  TW_SM90 static int m_of(int rank) { return kM == 1 ? 0 : rank % kM; }
  TW_SM90 static int n_of(int rank) { return kN == 1 ? 0 : rank / kM; }
  // The ranks, as a mask of bits, that share rows (A) or columns (B) with `rank`.
  TW_SM90 static uint16_t row_mask(int rank) {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < kN; i++) mask |= 1u << (i * kM);
    return (uint16_t)(mask << m_of(rank));
  }
  TW_SM90 static uint16_t column_mask(int rank) {
    return (uint16_t)(((1u << kM) - 1) << (n_of(rank) * kM));
  }
  // The i-th of `peers` workgroups that share a row or a column with `rank`: first its column, then the rest of its
  // row.
  TW_SM90 static int peer(int rank, int i) {
    if (i < kM) return n_of(rank) * kM + i;
    const int other = i - kM;  // the n of row mates, own n left out
    return m_of(rank) + (other + (other >= n_of(rank) ? 1 : 0)) * kM;
  }
};

}  // namespace tw::sm90

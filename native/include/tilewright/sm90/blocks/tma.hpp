// The bulk tensor copy engine. A map (CUtensorMap, 128 bytes at a multiple of 64) says where a tensor lies and which
// box of it one copy moves; coordinates are elements, fastest dimension first. Elements outside the tensor read as zero
// and are not written. One thread issues a copy for all.
#pragma once
#include "tilewright/sm90/blocks/base.hpp"

namespace tw::sm90 {

struct Coordinates {
  int x, y, z;
};

TW_SM90 void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Global to shared memory; the bytes are counted by `barrier`.
TW_SM90 void tma_load(uint32_t to, const void* map, Coordinates at, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}

// The same into every workgroup of the cluster whose bit is set in `ranks`, at the same address `to` of each, counted
// by the barrier at the same address of each.
TW_SM90 void tma_load_multicast(uint32_t to, const void* map, Coordinates at, uint32_t barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to), "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z),
      "h"(ranks)
      : "memory");
}

// Shared to global memory, as part of the calling thread's current group.
TW_SM90 void tma_store(const void* map, uint32_t from, Coordinates at) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(from), "r"(at.x), "r"(at.y), "r"(at.z)
               : "memory");
}

// Groups of stores, per thread: close the current one; wait until at most kPending of them have not yet read their
// source (its memory may then be reused).
TW_SM90 void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
TW_SM90 void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace tw::sm90

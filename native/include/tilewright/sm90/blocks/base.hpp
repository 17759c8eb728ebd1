// Basics of every Hopper block: addresses of shared memory, positions within a workgroup, fences, named barriers. Raw
// PTX: NVRTC alone compiles it.
#pragma once
#include "tilewright/core/integers.hpp"

#define TW_SM90 __device__ __forceinline__

namespace tw::sm90 {

constexpr int kWarp = 32, kWarpgroup = 128;

// The 32-bit address within the shared-memory window, as PTX takes it.
TW_SM90 uint32_t shared_address(const void* pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }

// The index of the calling warp's warpgroup. Read from lane 0, so that the compiler knows that a warp agrees on it and
// keeps what follows from it in uniform registers (matrix descriptors need those).
TW_SM90 int warpgroup_index() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / kWarpgroup, 0); }

// Barrier `id` (1 to 15; 0 is __syncthreads) over `threads` threads, whole warps. `join` waits, `signal` does not.
TW_SM90 void join_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
TW_SM90 void signal_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders the calling thread's ordinary writes to shared memory before later accesses by the tensor cores and the copy
// engine. Each writing thread calls it, then a barrier follows, then the access.
TW_SM90 void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A launch that may overlap the one before (programmatic dependent launch): wait until all its writes are visible;
// no-op otherwise. Nothing of device memory that another kernel may write is to be touched earlier.
TW_SM90 void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next launch begin its prologue.
TW_SM90 void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace tw::sm90

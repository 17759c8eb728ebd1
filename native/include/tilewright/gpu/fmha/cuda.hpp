// Functions of a device that attention on mma.sync needs beyond gpu/cuda/platform.hpp.
#pragma once
#include "tilewright/gpu/platform.hpp"

namespace tw::gpu {

// Adds four neighbouring values, aligned to 16 bytes, each atomically; one thread's sums keep their order.
TW_DEVICE void add_global_four(float* to, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
  TW_UNROLL
  for (int e = 0; e < 4; e++) add_global(to + e, x[e]);
#endif
}

// Waits for the other waves of group `id` (0 to 14), `threads` in all; every wave of the workgroup is in some group.
TW_DEVICE void barrier_of(int id, int threads) {
#if defined(TW_PLATFORM_HOST)
  (void)id, (void)threads;
  barrier();  // fibers know one barrier: all meet
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id + 1), "r"(threads) : "memory");
#endif
}

}  // namespace tw::gpu

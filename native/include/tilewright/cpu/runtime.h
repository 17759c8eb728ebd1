// The CPU device's native runtime: a pool of pinned threads on which teams run kernels, and memory that is ready to
// use. Compiled once into a shared library (runtime.cpp alone; link with -pthread) and called through this C interface.
#pragma once
#include <stdint.h>

#include "tilewright/cpu/team.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tw_pool tw_pool;

// A pool of `threads` slots; slot i runs on processor cpus[i]. NULL and errno if a thread cannot be made.
// After fork() the pool works on in the parent only: in the child every launch fails with ECHILD, and tw_pool_close
// frees nothing.
tw_pool* tw_pool_open(int32_t threads, const int32_t* cpus);

// Waits until no launch is under way, then ends the threads. No launch may begin meanwhile.
void tw_pool_close(tw_pool* pool);

// Runs fn(args, member) on a team and returns when all members have returned: 0, or an errno value (EINVAL: team is not
// in [1, threads]). The caller is member 0. With team > 1 it gets the slot of the processor that it is on, if that is
// free; else it is bound to its slot's processor for the time of the launch, and its own affinity is restored
// afterwards. Teams of several callers run side by side as long as they fit into the slots together; who does not fit
// waits, first come, first served.
int32_t tw_pool_launch(tw_pool* pool, tw_cpu_kernel fn, const void* args, int32_t team);

// The stages of a plan, in order, each on a team of its own size. nanoseconds is filled in. Stops at the first error
// and returns it.
typedef struct tw_stage {
  tw_cpu_kernel fn;
  const void* args;
  int32_t team;
  int64_t nanoseconds;
} tw_stage;
int32_t tw_pool_run(tw_pool* pool, tw_stage* stages, int32_t count);

// Zeroed memory for an arena: on huge pages where the system grants them, present (no page fault at first touch), 2 MiB
// aligned from 1 MiB up. NULL and errno on failure. Release with the same size.
void* tw_memory_reserve(int64_t bytes);
void tw_memory_release(void* memory, int64_t bytes);

#ifdef __cplusplus
}
#endif

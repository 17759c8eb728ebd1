// The calling convention between the server's CPU runtime and a CPU kernel: a *team* of threads calls the same entry
// point at the same time.
//
//   extern "C" void ENTRY(const void* args, tw_team* team);
//
// Every member sees the same args and its own rank in [0, size). A member may wait for the others at a barrier and may
// claim work from shared counters. The runtime zeroes the counters before each launch and returns to the caller when
// every member has returned. Kernels never allocate: scratch memory is the plan's workspace, passed in args.
#pragma once
#include <stdint.h>

#define TW_TEAM_COUNTERS 14

// Shared by all members of one launch. Each counter has a cache line of its own, so that claiming work does not slow
// the barrier.
typedef struct tw_team_state {
  struct {
    int64_t value;
    char pad[56];
  } arrived, generation, counters[TW_TEAM_COUNTERS];
} tw_team_state;

typedef struct tw_team {
  int32_t rank;
  int32_t size;
  tw_team_state* state;
} tw_team;

typedef void (*tw_cpu_kernel)(const void* args, tw_team* team);

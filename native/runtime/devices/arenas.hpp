// Workspace and counters of launches on a GPU: one piece of each for every stream, shared by launches that follow each
// other there. A graph that is captured has its own, because nothing orders it with other launches of the stream.
#pragma once
#include "common/lock.hpp"
#include "devices/gpu.hpp"

namespace tw {

struct Arena {
  Arena* next;
  uint64_t context, stream, capture;  // capture is 0 outside of captures
  uint64_t workspace, workspace_bytes;
  uint64_t counters, counter_bytes;
  uint64_t used;  // when, in launches
  const GpuApi* api;
};

// Held from before `arena_for` until the launch is on the stream: another thread may replace what is too small.
Lock& arenas_lock();
// The arena of a stream with as much as the plan needs.
tw_status arena_for(const GpuApi& api, const tw_plan* plan, uint64_t context, tw_stream stream, Arena** result);

// True if the stream is known to be of another context, which no launch of this one may use.
bool is_foreign(const GpuApi& api, uint64_t context, tw_stream stream);
tw_status foreign_stream();

// Memory of a context that is not current now: it may be gone, and its addresses those of others. It is freed by the
// next launch of its context that looks for an arena, or by the next plan that is bound there.
void retire_memory(const GpuApi& api, uint64_t context, uint64_t address);
void free_retired(const GpuApi& api, uint64_t context);

}  // namespace tw

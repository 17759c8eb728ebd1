#include "devices/arenas.hpp"

#include <stdlib.h>

#include "common/error.hpp"

namespace tw {
namespace {

constexpr uint64_t kArenaUnit = 1 << 20;
constexpr uint32_t kMaxArenas = 64;

Lock lock;
Arena* arenas;
uint64_t arena_clock;

// Memory of graphs that are gone, and of bindings that were closed elsewhere: freed by the next launch of its context
// that looks for an arena, and by the next plan that is bound there.
struct Retired {
  Retired* next;
  const GpuApi* api;
  uint64_t context;
  uint64_t address;
};
Lock retired_lock;
Retired* retired;

void retire(void* object) {  // called by the driver, whose functions may not be called here
  Retired* const own = (Retired*)object;
  const Guard guard(retired_lock);
  own->next = retired, retired = own;
}

tw_status grow_captured(const GpuApi& api, Arena* arena, uint64_t* address, uint64_t* have, uint64_t bytes, void* graph) {
  Retired* const end = (Retired*)calloc(1, sizeof(Retired));
  if (!end) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for the workspace of a graph");
  const RelaxedCapture relaxed(api);
  uint64_t fresh = 0;
  int code = api.allocate(&fresh, bytes);
  if (!code) {
    end->api = &api, end->context = arena->context, end->address = fresh;
    code = api.tie_to_graph(graph, end, retire);
    if (code) api.release(fresh);
  }
  if (code) {
    free(end);
    return driver_error(api, code, "workspace of a captured graph");
  }
  *address = fresh, *have = bytes;  // a smaller piece before it stays the graph's
  return TW_OK;
}

tw_status grow(const GpuApi& api, uint64_t* address, uint64_t* have, uint64_t bytes, tw_stream stream) {
  uint64_t fresh = 0;
  const int code = api.allocate_async(&fresh, bytes, stream);
  if (code) return driver_error(api, code, "workspace");
  if (*address) api.release_async(*address, stream);  // behind what uses it
  *address = fresh, *have = bytes;
  return TW_OK;
}

void drop_oldest(const GpuApi& api, uint64_t context) {
  uint32_t count = 0;
  Arena** oldest = nullptr;
  for (Arena** at = &arenas; *at; at = &(*at)->next) {
    count++;
    if ((*at)->api == &api && (*at)->context == context && (!oldest || (*at)->used < (*oldest)->used)) oldest = at;
  }
  if (count < kMaxArenas || !oldest) return;
  Arena* const gone = *oldest;
  *oldest = gone->next;
  if (!gone->capture) {
    const RelaxedCapture relaxed(api);
    if (gone->workspace) api.release(gone->workspace);  // waits for what uses it
    if (gone->counters) api.release(gone->counters);
  }
  free(gone);
}

}  // namespace

Lock& arenas_lock() { return lock; }

void retire_memory(const GpuApi& api, uint64_t context, uint64_t address) {
  Retired* const own = (Retired*)calloc(1, sizeof(Retired));
  if (!own) return;  // it stays until the context ends
  own->api = &api, own->context = context, own->address = address;
  retire(own);
}

void free_retired(const GpuApi& api, uint64_t context) {
  Retired* mine = nullptr;
  {
    const Guard guard(retired_lock);
    for (Retired** at = &retired; *at;) {
      Retired* const own = *at;
      if (own->api == &api && own->context == context) {
        *at = own->next;
        own->next = mine, mine = own;
      } else {
        at = &own->next;
      }
    }
  }
  if (!mine) return;
  const RelaxedCapture relaxed(api);
  while (mine) {
    Retired* const next = mine->next;
    api.release(mine->address);
    free(mine);
    mine = next;
  }
}

tw_status foreign_stream() {
  return fail(TW_WRONG_DEVICE, "stream_context",
      "give a stream that was made in the current context, and make that of the plan's device current",
      "the stream belongs to another context or device than the launch");
}

bool is_foreign(const GpuApi& api, uint64_t context, tw_stream stream) {
  uint64_t owner = 0;
  return api.stream_context && !api.stream_context(stream, &owner) && owner != context;
}

tw_status arena_for(const GpuApi& api, const tw_plan* plan, uint64_t context, tw_stream stream, Arena** result) {
  bool capturing = false;
  uint64_t capture = 0, id = 0;
  void* graph = nullptr;
  int code = api.capture(stream, &capturing, &capture, &graph);
  if (capturing)
    id = (uint64_t)(uintptr_t)stream;  // CUDA tells no number of a stream that is captured, and its handle lives as long
  else if (!code)
    code = api.stream_id(stream, &id);
  if (code) return is_foreign(api, context, stream) ? foreign_stream() : driver_error(api, code, "looking at the stream");
  if (!capturing) {
    capture = 0;
    free_retired(api, context);
  }
  Arena* arena = arenas;
  while (arena && !(arena->api == &api && arena->context == context && arena->stream == id && arena->capture == capture))
    arena = arena->next;
  if (!arena) {
    if (is_foreign(api, context, stream)) return foreign_stream();
    if (!capturing) drop_oldest(api, context);
    arena = (Arena*)calloc(1, sizeof(Arena));
    if (!arena) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a workspace");
    arena->api = &api, arena->context = context, arena->stream = id, arena->capture = capture;
    arena->next = arenas, arenas = arena;
  }
  arena->used = ++arena_clock;
  const uint64_t unit = capturing ? 256 : kArenaUnit;
  const uint64_t workspace = (plan->header->workspace_bytes + unit - 1) / unit * unit;
  const uint64_t counters = (plan->header->counter_bytes + 65535) / 65536 * 65536;
  if (arena->workspace_bytes < workspace) {
    const tw_status status =
        capturing ? grow_captured(api, arena, &arena->workspace, &arena->workspace_bytes, workspace, graph)
                  : grow(api, &arena->workspace, &arena->workspace_bytes, workspace, stream);
    if (status) return status;
  }
  if (arena->counter_bytes < counters) {
    const tw_status status = capturing
                                 ? grow_captured(api, arena, &arena->counters, &arena->counter_bytes, counters, graph)
                                 : grow(api, &arena->counters, &arena->counter_bytes, counters, stream);
    if (status) return status;
    code = api.clear_async(arena->counters, counters, stream);
    if (code) {
      arena->counter_bytes = 0;
      return driver_error(api, code, "clearing counters");
    }
  }
  *result = arena;
  return TW_OK;
}

}  // namespace tw

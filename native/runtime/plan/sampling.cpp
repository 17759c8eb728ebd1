#include "plan/sampling.hpp"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "devices/gpu.hpp"
#include "common/lock.hpp"

namespace tw {

// Events of one context around the sample that was taken last. They are kept: whoever destroyed the context has
// destroyed them, too.
struct EventPair {
  EventPair* next;
  const GpuApi* api;
  uint64_t context;
  void* events[2];
  tw_launch_record* record;  // waits for the time; NULL: none does
  bool open;                 // between the two events
};

namespace {

constexpr uint32_t kMaxPairs = 64;

struct EventApi {
  int (*create)(void** event, unsigned flags);
  int (*record)(void* event, void* stream);
  int (*query)(void* event);
  int (*elapsed)(float* ms, void* begin, void* end);
};

struct Events {
  const char* library;
  const char* names[4];
  EventApi api;
  bool looked, there;
};

Lock lock;  // guards all that follows
Events cuda_events = {"libcuda.so.1", {"cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime"}, {}, false, false};
Events hip_events = {
    "libamdhip64.so", {"hipEventCreateWithFlags", "hipEventRecord", "hipEventQuery", "hipEventElapsedTime"}, {}, false, false};
EventPair* pairs;
uint32_t pair_count;

const EventApi* events_of(const GpuApi& api) {
  Events& events = &api == &cuda_api() ? cuda_events : hip_events;
  if (!events.looked) {
    events.looked = true;
    void* found[4];
    events.there = !open_driver(events.library, events.names, found, 4);
    if (events.there) memcpy(&events.api, found, sizeof found);
  }
  return events.there ? &events.api : nullptr;
}

uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

void add(tw_launch_record* record, uint64_t ns) {
  __atomic_fetch_add(&record->sampled_ns, ns, __ATOMIC_RELAXED);
  __atomic_fetch_add(&record->samples, 1, __ATOMIC_RELAXED);
}

EventPair* pair_of(const GpuApi& api, const EventApi& events, uint64_t context) {
  for (EventPair* pair = pairs; pair; pair = pair->next)
    if (pair->api == &api && pair->context == context) return pair;
  if (pair_count >= kMaxPairs) return nullptr;
  EventPair* const fresh = (EventPair*)calloc(1, sizeof(EventPair));
  if (!fresh) return nullptr;
  if (events.create(&fresh->events[0], 0) || events.create(&fresh->events[1], 0)) return free(fresh), nullptr;
  fresh->api = &api, fresh->context = context, fresh->next = pairs, pairs = fresh, pair_count++;
  return fresh;
}

// The pair to use for a sample; NULL if none can be taken now.
EventPair* begin_on_gpu(const GpuApi& api, tw_launch_record* record, tw_stream stream) {
  uint64_t context = 0, capture = 0;
  bool capturing = false;
  void* graph = nullptr;
  if (api.context(&context) || api.capture(stream, &capturing, &capture, &graph) || capturing) return nullptr;
  const Guard guard(lock);
  const EventApi* const events = events_of(api);
  if (!events) return nullptr;
  const RelaxedCapture relaxed(api);
  EventPair* const pair = pair_of(api, *events, context);
  if (!pair || pair->open) return nullptr;
  if (pair->record) {
    float ms = 0;
    if (events->query(pair->events[1])) return nullptr;  // the one before it has not ended
    if (!events->elapsed(&ms, pair->events[0], pair->events[1]) && ms >= 0) add(pair->record, (uint64_t)(ms * 1e6f));
    pair->record = nullptr;
  }
  if (events->record(pair->events[0], stream)) return nullptr;
  pair->open = true, pair->record = record;
  return pair;
}

void end_on_gpu(EventPair* pair, tw_stream stream, bool counts) {
  const Guard guard(lock);
  pair->open = false;
  if (!counts || events_of(*pair->api)->record(pair->events[1], stream)) pair->record = nullptr;
}

}  // namespace

void Sampled::begin(const tw_plan* plan, tw_stream stream) {
  if (plan->header->device_kind == TW_CPU) {
    begin_ns_ = now_ns();
    timed_ = true;
    return;
  }
  pair_ = begin_on_gpu(plan->header->device_kind == TW_CUDA ? cuda_api() : hip_api(), record_, stream);
  stream_ = stream;
  timed_ = pair_ != nullptr;
}

void Sampled::end(bool counts) {
  timed_ = false;
  if (pair_)
    end_on_gpu(pair_, stream_, counts);
  else if (counts)
    add(record_, now_ns() - begin_ns_);
}

void forget_samples(const tw_launch_record* record) {
  const Guard guard(lock);
  for (EventPair* pair = pairs; pair; pair = pair->next)
    if (pair->record == record) pair->record = nullptr;
}

}  // namespace tw

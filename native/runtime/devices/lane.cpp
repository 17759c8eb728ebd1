// Launches of one client on one stream, and the packets that ask for them.
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "common/error.hpp"
#include "devices/gpu.hpp"
#include "worker.h"

namespace tw {
namespace {

struct Frame {  // docs/protocol.md: every packet begins with one
  uint8_t kind, flags;
  uint16_t slot;
  uint32_t sequence;
  uint64_t value;
};
static_assert(sizeof(Frame) == 16, "packed");
constexpr uint8_t kLaunch = 3, kReply = 0x80;
constexpr uint32_t kSlots = 65536;
constexpr uint32_t kFlags = TW_WAIT | TW_RECORD | TW_TIME;

struct Entry {
  uint64_t id;
  const tw_binding* binding;  // NULL: there is none
  uint64_t number;
};
struct Slot {
  void *producer, *completion;
};

uint64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

uint64_t today() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

// Threads of this process that look for packets without sleeping: one for every four processors, so that they leave
// most to others. A client that falls silent costs one of them `spin_ns` once.
uint32_t spinning;
uint32_t most_spinning;
pthread_once_t spinning_once = PTHREAD_ONCE_INIT;
void count_processors() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const int count = sched_getaffinity(0, sizeof allowed, &allowed) ? 1 : CPU_COUNT(&allowed);
  most_spinning = (uint32_t)count / 4;
}
bool begin_spinning() {
  if (__atomic_add_fetch(&spinning, 1, __ATOMIC_RELAXED) <= most_spinning) return true;
  __atomic_sub_fetch(&spinning, 1, __ATOMIC_RELAXED);
  return false;
}
void end_spinning() { __atomic_sub_fetch(&spinning, 1, __ATOMIC_RELAXED); }

}  // namespace
}  // namespace tw

struct tw_lane {
  pthread_mutex_t mutex;
  const tw::GpuApi* api;
  tw_stream stream;
  uint64_t* note;
  void *begin, *end;
  uint64_t producer, completion;  // addresses of signals; 0: there are none
  uint64_t awaited, sequence;     // counts that slots and sequence numbers are the low bits of
  uint64_t waits;
  tw_trace* trace;  // of the packet that is served, or comes next
  uint32_t disturbed;
  bool follows;  // the last packet came soon after the one before
  // By id, with open addressing; its size is a power of two, and at most half of it is in use.
  tw::Entry* entries;
  uint32_t size, used;
  tw::Slot* slots;  // kSlots of them, once there is one: memory that nobody touches costs nothing
};

namespace tw {
namespace {

Entry* place_of(Entry* entries, uint32_t size, uint64_t id) {
  uint32_t at = (uint32_t)((id * 0x9E3779B97F4A7C15u) >> 32) & (size - 1);
  while (entries[at].binding && entries[at].id != id) at = (at + 1) & (size - 1);
  return entries + at;
}

// The only place that fails for want of memory leaves everything as it was.
bool make_room(tw_lane* lane) {
  if (lane->size && lane->used + 1 <= lane->size / 2) return true;
  const uint32_t size = lane->size ? lane->size * 2 : 16;
  Entry* const entries = (Entry*)calloc(size, sizeof(Entry));
  if (!entries) return false;
  for (uint32_t i = 0; i < lane->size; i++)
    if (lane->entries[i].binding) *place_of(entries, size, lane->entries[i].id) = lane->entries[i];
  free(lane->entries);
  lane->entries = entries, lane->size = size;
  return true;
}

class Locked {
 public:
  explicit Locked(tw_lane* lane) : lane_(lane) { pthread_mutex_lock(&lane->mutex); }
  ~Locked() { pthread_mutex_unlock(&lane_->mutex); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  tw_lane* lane_;
};

tw_status failed(const tw_lane* lane, int code, const char* what) {
  const char *name = "", *text = "";
  lane->api->describe(code, &name, &text);
  return concerning(fail(TW_DRIVER, "device_driver", "look at earlier launches", "%s failed: %s (%s)", what, name, text),
      -1, code);
}

const Slot* slot_of(const tw_lane* lane, uint32_t flags, uint16_t slot) {
  const Slot* const found = lane->slots ? lane->slots + slot : nullptr;
  return found && found->completion && (found->producer || !(flags & TW_WAIT)) ? found : nullptr;
}

// True if the launch needs nothing that is not there.
bool is_prepared(const tw_lane* lane, uint32_t flags, uint16_t slot) {
  if (flags & (TW_WAIT | TW_RECORD) && !lane->producer && !slot_of(lane, flags, slot)) return false;
  if (flags & TW_TIME) return lane->begin && !(flags & TW_WAIT);  // a wait for another process is not waited for here
  return true;
}

// Lets launches behind wait for the client's stream, or it for those before: by `events`, which are those of the slot,
// or without them by the lane's signals. The driver's code.
int await_client(const tw_lane* lane, const Slot* events) {
  return events ? lane->api->wait_event(lane->stream, events->producer)
                : lane->api->wait_value(lane->stream, lane->producer, lane->awaited);
}
int tell_client(const tw_lane* lane, const Slot* events) {
  return events ? lane->api->record_event(events->completion, lane->stream)
                : lane->api->write_value(lane->stream, lane->completion, lane->sequence);
}

// `events` are those of the slot; without them the lane has signals.
tw_status launch(tw_lane* lane, const tw_binding* binding, uint32_t flags, const Slot* events) {
  const GpuApi& api = *lane->api;
  int code = 0;
  if (flags & TW_WAIT) code = await_client(lane, events);
  if (code) return failed(lane, code, events ? "waiting for an event" : "waiting for a signal");
  if (flags & TW_TIME) code = api.record_event(lane->begin, lane->stream);
  if (code) return failed(lane, code, "recording an event");
  tw_trace* const trace = lane->trace;  // its events may fail without harm: then its time is not known
  if (trace && !trace->launches) api.record_event(trace->begin, lane->stream);
  const tw_status status = tw_launch(binding, lane->stream);
  if (status) return status;
  if (trace) api.record_event(trace->end, lane->stream), trace->queued_ns = today(), trace->launches++;
  if (flags & TW_TIME) code = api.record_event(lane->end, lane->stream);
  if (!code && flags & TW_RECORD) code = tell_client(lane, events);
  return code ? failed(lane, code, "recording the end of a launch") : TW_OK;
}

int receive(int connection, int flags, tw_packet* packet) {
  ssize_t count;
  do count = recv(connection, packet->data, sizeof packet->data, flags);
  while (count < 0 && errno == EINTR);
  return (int)count;
}

// The next packet, or false at the end of the connection.
bool next(tw_lane* lane, int connection, uint64_t spin_ns, tw_packet* packet) {
  const uint64_t begun = now();
  int count = -1;
  packet->at = packet->count = 0;
  if (lane->follows && spin_ns && begin_spinning()) {
    do {
      count = receive(connection, MSG_DONTWAIT, packet);
      if (count >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) break;
      sched_yield();  // to whoever else wants this processor
    } while (now() - begun < spin_ns);
    end_spinning();
    if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
  }
  if (count < 0) count = receive(connection, 0, packet);
  lane->follows = now() - begun < spin_ns;
  packet->count = count > 0 ? (uint32_t)count : 0;
  return count > 0;
}

bool answer(int connection, const Frame& frame, uint64_t nanoseconds) {
  const Frame reply = {(uint8_t)(kLaunch | kReply), 0, frame.slot, frame.sequence, nanoseconds};
  ssize_t sent;
  do sent = send(connection, &reply, sizeof reply, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  return sent >= 0;
}

// Once for each frame that is seen, or more often: what the counts are then.
void count(tw_lane* lane, const Frame& frame) {
  if (!lane->producer) return;
  lane->sequence += (uint32_t)(frame.sequence - (uint32_t)lane->sequence);
  if (frame.flags & TW_WAIT)
    __atomic_add_fetch(&lane->awaited, (uint16_t)(frame.slot - (uint16_t)lane->awaited), __ATOMIC_RELAXED);
}

void end_trace(tw_lane* lane) {
  const Locked locked(lane);
  __atomic_store_n(&lane->trace->over, 1, __ATOMIC_RELEASE);
  lane->trace = nullptr;
}

// Launches one frame: the answer of tw_lane_serve, or -1 for success.
int serve(tw_lane* lane, int connection, const Frame& frame, tw_packet* packet) {
  {
    const Locked locked(lane);
    if (lane->trace && !lane->trace->started_ns) lane->trace->started_ns = today();
    if (frame.kind != kLaunch || __atomic_exchange_n(&lane->disturbed, 0, __ATOMIC_ACQ_REL)) return TW_UNPREPARED;
    count(lane, frame);
    const Entry* const entry = lane->size ? place_of(lane->entries, lane->size, frame.value) : nullptr;
    if (!entry || !entry->binding || !is_prepared(lane, frame.flags, frame.slot)) return TW_UNPREPARED;
    if (lane->note) {
      __atomic_store_n(&lane->note[0], entry->number, __ATOMIC_RELAXED);
      __atomic_store_n(&lane->note[1], now(), __ATOMIC_RELAXED);
    }
    const bool tied = frame.flags & (TW_WAIT | TW_RECORD) && !lane->producer;
    packet->status = launch(
        lane, entry->binding, frame.flags & kFlags, tied ? slot_of(lane, frame.flags, frame.slot) : nullptr);
  }
  uint64_t nanoseconds = 0;
  if (!packet->status && frame.flags & TW_TIME) packet->status = tw_lane_finish(lane, &nanoseconds);
  if (packet->status) return TW_FAILED;
  if (frame.flags & (TW_REPLY | TW_TIME) && !answer(connection, frame, nanoseconds)) return TW_ENDED;
  return -1;
}

}  // namespace
}  // namespace tw

tw_status tw_lane_open(int32_t device_kind, tw_stream stream, tw_lane** result) {
  if (!result) return tw::null_argument("tw_lane_open");
  *result = nullptr;
  if (device_kind != TW_CUDA && device_kind != TW_HIP)
    return tw::fail(TW_UNSUPPORTED, "device_kind", "give TW_CUDA or TW_HIP", "lanes are streams of a GPU");
  const tw::GpuApi& api = device_kind == TW_CUDA ? tw::cuda_api() : tw::hip_api();
  const tw_status status = api.open();
  if (status) return status;
  tw_lane* const lane = (tw_lane*)calloc(1, sizeof(tw_lane));
  if (!lane) return tw::fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a lane");
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&lane->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  pthread_once(&tw::spinning_once, tw::count_processors);
  lane->api = &api, lane->stream = stream;
  *result = lane;
  return TW_OK;
}

void tw_lane_close(tw_lane* lane) {
  if (!lane) return;
  pthread_mutex_destroy(&lane->mutex);
  free(lane->entries);
  free(lane->slots);
  free(lane);
}

void tw_lane_note(tw_lane* lane, uint64_t* note) { lane->note = note; }
void tw_lane_lock(tw_lane* lane) { pthread_mutex_lock(&lane->mutex); }
void tw_lane_unlock(tw_lane* lane) { pthread_mutex_unlock(&lane->mutex); }

tw_status tw_lane_put(tw_lane* lane, uint64_t id, const tw_binding* binding, uint64_t number) {
  if (!lane || !binding) return tw::null_argument("tw_lane_put");
  const tw::Locked locked(lane);
  if (!tw::make_room(lane)) return tw::fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a binding");
  tw::Entry* const entry = tw::place_of(lane->entries, lane->size, id);
  if (!entry->binding) lane->used++;
  *entry = {id, binding, number};
  return TW_OK;
}

void tw_lane_forget(tw_lane* lane, uint64_t id) {
  const tw::Locked locked(lane);
  if (!lane->size) return;
  tw::Entry* entry = tw::place_of(lane->entries, lane->size, id);
  if (!entry->binding) return;
  entry->binding = nullptr, lane->used--;
  // Those behind it move up, so that they are found without it.
  const uint32_t mask = lane->size - 1;
  for (uint32_t at = ((uint32_t)(entry - lane->entries) + 1) & mask; lane->entries[at].binding; at = (at + 1) & mask) {
    const tw::Entry moved = lane->entries[at];
    lane->entries[at].binding = nullptr;
    *tw::place_of(lane->entries, lane->size, moved.id) = moved;
  }
}

void tw_lane_forget_all(tw_lane* lane) {
  const tw::Locked locked(lane);
  free(lane->entries);
  lane->entries = nullptr, lane->size = lane->used = 0;
}

void tw_lane_disturb(tw_lane* lane) { __atomic_store_n(&lane->disturbed, 1, __ATOMIC_RELEASE); }

tw_status tw_lane_slot(tw_lane* lane, uint16_t slot, void* producer, void* completion) {
  const tw::Locked locked(lane);
  if (!lane->slots) lane->slots = (tw::Slot*)calloc(tw::kSlots, sizeof(tw::Slot));
  if (!lane->slots) return tw::fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for events");
  lane->slots[slot] = {producer, completion};
  return TW_OK;
}

tw_status tw_lane_signals(tw_lane* lane, uint64_t producer, uint64_t completion) {
  const tw::Locked locked(lane);
  if (!lane->api->wait_value || !lane->api->write_value)
    return tw::fail(TW_UNSUPPORTED, "signal_support", "use events", "streams of this device are not tied by signals");
  lane->producer = producer, lane->completion = completion;
  return TW_OK;
}

uint64_t tw_lane_awaited(const tw_lane* lane) { return __atomic_load_n(&lane->awaited, __ATOMIC_RELAXED); }

void tw_lane_timers(tw_lane* lane, void* begin, void* end) {
  const tw::Locked locked(lane);
  lane->begin = begin, lane->end = end;
}

void tw_lane_trace(tw_lane* lane, tw_trace* trace) {
  const tw::Locked locked(lane);
  lane->trace = trace;
}

uint64_t tw_lane_waits(const tw_lane* lane) { return __atomic_load_n(&lane->waits, __ATOMIC_RELAXED); }

tw_status tw_lane_launch(tw_lane* lane, const tw_binding* binding, uint32_t flags, uint16_t slot) {
  if (!lane || !binding) return tw::null_argument("tw_lane_launch");
  const tw::Locked locked(lane);
  const tw::Slot* const events = flags & (TW_WAIT | TW_RECORD) ? tw::slot_of(lane, flags, slot) : nullptr;
  if (flags & (TW_WAIT | TW_RECORD) && !events)
    return tw::fail(TW_INVALID_ARGUMENT, "event_slot", "open the slot's events first", "the slot has no such events");
  if (flags & TW_TIME && !lane->begin)
    return tw::fail(TW_INVALID_ARGUMENT, "event_timers", "call tw_lane_timers first", "the lane has no timers");
  return tw::launch(lane, binding, flags, events);
}

tw_status tw_lane_tie(tw_lane* lane, uint32_t flags, uint16_t slot, uint32_t sequence) {
  if (!lane) return tw::null_argument("tw_lane_tie");
  const tw::Locked locked(lane);
  tw::count(lane, {tw::kLaunch, (uint8_t)flags, slot, sequence, 0});
  const tw::Slot* const events = lane->producer ? nullptr : tw::slot_of(lane, flags, slot);
  if (!lane->producer && !events)
    return tw::fail(TW_INVALID_ARGUMENT, "event_slot", "open the slot's events first", "the slot has no such events");
  int code = flags & TW_WAIT ? tw::await_client(lane, events) : 0;
  if (!code && flags & TW_RECORD) code = tw::tell_client(lane, events);
  return code ? tw::failed(lane, code, "tying a stream to the client's") : TW_OK;
}

tw_status tw_lane_finish(tw_lane* lane, uint64_t* nanoseconds) {
  __atomic_add_fetch(&lane->waits, 1, __ATOMIC_RELAXED);
  float milliseconds = 0;
  int code = lane->api->finish_event(lane->end);
  if (!code) code = lane->api->elapsed(&milliseconds, lane->begin, lane->end);
  if (code) return tw::failed(lane, code, "waiting for a launch");
  *nanoseconds = milliseconds > 0 ? (uint64_t)(milliseconds * 1e6 + 0.5) : 0;
  return TW_OK;
}

int32_t tw_lane_serve(tw_lane* lane, int32_t connection, uint64_t spin_ns, tw_packet* packet) {
  for (;;) {
    if (packet->at >= packet->count) {
      if (lane->trace && lane->trace->started_ns) tw::end_trace(lane);
      if (!tw::next(lane, connection, spin_ns, packet)) return TW_ENDED;
      const uint32_t count = packet->count;
      if (count % sizeof(tw::Frame) || count > TW_PACKET_BYTES || packet->data[0] != tw::kLaunch) return TW_OTHER;
    }
    tw::Frame frame;
    memcpy(&frame, packet->data + packet->at, sizeof frame);
    const int answer = tw::serve(lane, connection, frame, packet);
    if (answer >= 0) return answer;
    packet->at += sizeof frame;
  }
}

/* libtilewright for processes that launch what others ask for: plans whose functions and memory are the caller's, and
 * connections whose packets of launches (docs/protocol.md) are served without returning to the caller between them.
 *
 * The server's own processes of GPUs use it. It is no part of the stable interface: a process and its library are of
 * one release. Only plans of a GPU have any of this; the context of their stream must be current in every thread. */
#ifndef TILEWRIGHT_WORKER_H
#define TILEWRIGHT_WORKER_H

#include "tilewright.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Functions of the driver, one for each stage, that the caller has loaded for the current context and keeps there for
 * as long as bindings of the plan are launched. For plans without code objects. */
TW_API tw_status tw_plan_adopt(tw_plan* plan, void* const* functions, uint32_t count);
/* Bytes of device memory that a binding needs for counters, and for tables of arguments. */
TW_API tw_status tw_plan_memory(const tw_plan* plan, uint64_t* counter_bytes, uint64_t* table_bytes);

/* Memory of the device for one binding, all of it the caller's. */
typedef struct tw_memory {
  uint32_t struct_bytes; /* set by the caller */
  uint32_t reserved;     /* 0 */
  uint64_t workspace;    /* addresses; 0 where the plan needs none */
  uint64_t counters;     /* zeroed; used by nothing that runs at the same time */
  uint64_t tables;
  tw_stream stream; /* tables are uploaded in its order */
} tw_memory;
/* A binding that is complete: its launches allocate nothing and take no lock. The caller frees the memory, behind what
 * was launched. */
TW_API tw_status tw_bind_in(
    tw_plan* plan, const uint64_t* addresses, uint32_t count, const tw_memory* memory, tw_binding** binding);
/* One stage of a binding alone. */
TW_API tw_status tw_launch_stage(const tw_binding* binding, uint32_t stage, tw_stream stream);

/* Flags of a launch. */
enum { TW_WAIT = 1, TW_RECORD = 2, TW_REPLY = 4, TW_TIME = 8 };

/* Launches of one client on one stream. Everything but tw_lane_serve may be called from any thread; what changes
 * bindings is done with the lane locked, which keeps launches out. The lock may be taken again by its holder. */
typedef struct tw_lane tw_lane;
/* `note` is two words, into which each launch writes a number and the time (CLOCK_MONOTONIC, nanoseconds). */
TW_API tw_status tw_lane_open(int32_t device_kind, tw_stream stream, tw_lane** lane);
TW_API void tw_lane_close(tw_lane* lane);
TW_API void tw_lane_note(tw_lane* lane, uint64_t* note);
TW_API void tw_lane_lock(tw_lane* lane);
TW_API void tw_lane_unlock(tw_lane* lane);
/* Lets packets launch `binding` as `id`; `number` is for the note. The binding stays open until it is forgotten. */
TW_API tw_status tw_lane_put(tw_lane* lane, uint64_t id, const tw_binding* binding, uint64_t number);
TW_API void tw_lane_forget(tw_lane* lane, uint64_t id);
TW_API void tw_lane_forget_all(tw_lane* lane);
/* From now on nothing is launched as it is: the next packet comes back as unprepared, once. Never waits. */
TW_API void tw_lane_disturb(tw_lane* lane);
/* Events of a slot: of the client, which a launch waits for (may be NULL), and the lane's own. NULL, NULL: none. */
TW_API tw_status tw_lane_slot(tw_lane* lane, uint16_t slot, void* producer, void* completion);
/* In place of events: addresses of two numbers that the client sees, too. A packet's launch with TW_WAIT waits until
 * the first is at least its slot, and one with TW_RECORD writes its sequence number to the second; both are taken as
 * counts that go on beyond their 16 and 32 bits. 0, 0: events again. */
TW_API tw_status tw_lane_signals(tw_lane* lane, uint64_t producer, uint64_t completion);
/* The largest number that a launch waits, or has waited, for. */
TW_API uint64_t tw_lane_awaited(const tw_lane* lane);
/* Events with timing, between which launches with TW_TIME run. */
TW_API void tw_lane_timers(tw_lane* lane, void* begin, void* end);
/* What becomes of one packet of launches, for a trace of it. It stays where it is until it is over or taken away. */
typedef struct tw_trace {
  void *begin, *end;   /* events with timing: before the first launch, behind the last */
  uint64_t started_ns; /* when it was looked at, and when its last launch was queued: nanoseconds since 1970 */
  uint64_t queued_ns;
  uint32_t launches;
  uint32_t over; /* 1: nothing is added any more */
} tw_trace;
/* Trace the packet of launches that comes next; NULL: none. To be called by the thread of tw_lane_serve. */
TW_API void tw_lane_trace(tw_lane* lane, tw_trace* trace);
/* How often a thread has waited for the device here. */
TW_API uint64_t tw_lane_waits(const tw_lane* lane);

/* One launch, which was prepared; TW_TIME is waited for by tw_lane_finish. */
TW_API tw_status tw_lane_launch(tw_lane* lane, const tw_binding* binding, uint32_t flags, uint16_t slot);
/* The part of TW_WAIT and TW_RECORD of a packet's launch that failed: launches before and behind it keep their order
 * with the client's stream. */
TW_API tw_status tw_lane_tie(tw_lane* lane, uint32_t flags, uint16_t slot, uint32_t sequence);
/* Waits for the last launch with TW_TIME, and gives its time on the device in nanoseconds. */
TW_API tw_status tw_lane_finish(tw_lane* lane, uint64_t* nanoseconds);

#define TW_PACKET_BYTES 1024

typedef struct tw_packet {
  uint32_t count; /* bytes of the packet; 0 for none */
  uint32_t at;    /* of its frame that comes next */
  tw_status status; /* of the launch that failed */
  uint32_t reserved;
  unsigned char data[TW_PACKET_BYTES + 1]; /* one more than the longest, so that a longer one shows */
} tw_packet;

/* Why tw_lane_serve returns. */
enum {
  TW_ENDED = 0,      /* the connection */
  TW_OTHER = 1,      /* a packet that is none of launches */
  TW_UNPREPARED = 2, /* the launch at `at` needs what is not there: binding, events, timers; or means nothing */
  TW_FAILED = 3      /* the launch at `at`, with tw_last_error */
};
/* Launches what comes over a connection, and answers, until something comes that it cannot do: the caller answers
 * it, and moves `at` on, or prepares it, and leaves `at` as it is. `spin_ns` is how long the next packet is looked for
 * without sleeping, where packets follow each other as closely. */
TW_API int32_t tw_lane_serve(tw_lane* lane, int32_t connection, uint64_t spin_ns, tw_packet* packet);

/* Boosted regression trees as arrays over all nodes. A leaf has the feature -1 and a value; other nodes go left where
 * the row's feature is at most the threshold. Children come after their parents. */
typedef struct tw_trees {
  const int32_t* feature;
  const float* threshold;
  const int32_t* left;
  const int32_t* right;
  const float* value;
  const int32_t* root; /* of each tree */
  int64_t count;       /* trees */
} tw_trees;
/* Sums of the trees for `count` rows of `width` features. Nothing is checked: the caller has read the model. */
TW_API void tw_trees_sum(const tw_trees* trees, const float* rows, int64_t count, int64_t width, double* sums);

#ifdef __cplusplus
}
#endif
#endif

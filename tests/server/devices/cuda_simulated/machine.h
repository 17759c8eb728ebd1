// The machine, of whichever vendor: memory that other processes find by name, queues of work, events.
//
// Result codes have the same numbers in CUDA and in HIP. What a launch does is for the library to say: it defines Func,
// launch_ready() and launch_perform().
#pragma once
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int R;
typedef unsigned long long Ptr;
enum {
  OK = 0,
  INVALID_VALUE = 1,
  OOM = 2,
  NO_DEVICE = 100,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  UNKNOWN = 999,
  CONTEXT_GONE = 709,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  INVALID_CLUSTER = 912,
  INVALID_IMAGE = 200
};
#define MEMORY (192ull << 20)
#ifndef FIRST_DEVICE
#define FIRST_DEVICE 0  // the device of a thread that chose none, counted from 1; 0: calls fail without one
#endif

static pthread_mutex_t lock;
static __thread int current = FIRST_DEVICE;  // the device whose context it is, counted from 1
static __thread int made_context;             // which of the contexts that were created it is; 0: the device's primary one
static int context_gone[256];
static int sticky;
// Of whoever makes calls fail (tests/faults/shim.c), if anybody does: the result of this one; below 0, of all from now.
__attribute__((weak)) int tw_driver_step(void);
// The file that TW_SIM_RESETS names counts resets of the driver: from one on, all calls of processes of before fail.
static int was_reset(void) {
  static volatile int64_t* resets;
  static int64_t before;
  const char* path = getenv("TW_SIM_RESETS");
  if (path && !resets) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    void* at = fd < 0 ? MAP_FAILED : mmap(0, sizeof *resets, PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    if (at == MAP_FAILED) return 0;
    resets = at, before = *resets;
  }
  return resets && *resets != before;
}
static R injected(void) {
  const int r = was_reset() ? -UNKNOWN : tw_driver_step ? tw_driver_step() : 0;
  if (r < 0) sticky = -r;
  return r < 0 ? -r : r;
}
#define ENTER                                            \
  if (!current) return INVALID_CONTEXT;                  \
  if (context_gone[made_context]) return CONTEXT_GONE;   \
  Guard guard __attribute__((cleanup(leave))) = enter(); \
  if (sticky) return sticky;                             \
  const R refused = injected();                          \
  if (refused) return refused
typedef int Guard;
static Guard enter(void) {
  pthread_mutex_lock(&lock);
  return 0;
}
static void leave(Guard* g) {
  (void)g;
  pthread_mutex_unlock(&lock);
}
__attribute__((constructor)) static void begin(void) {
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a);
  pthread_mutexattr_settype(&a, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&lock, &a);
}
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

// Shared memory by name, so that other processes find it.
typedef struct Range {
  Ptr base;
  size_t size;
  char name[40];
  int kind, pool, device;
  unsigned id, uses;  // no two have the same; how often it was opened besides
  void* source;       // what is mapped here, where that matters
  struct Range* next;
} Range;
enum { LEGACY = 1, POOLED, IMPORTED, MAPPED };
static Range* ranges;
static unsigned serial, identities;
// TW_SIM_TAG tells the names of one run from another's, so that what is left over can be removed.
static const char* tag(void) {
  const char* t = getenv("TW_SIM_TAG");
  return t ? t : "sim";
}
// Names carry the number that a device has in the machine; a process may see some devices only, under other numbers.
static int in_machine(int device);
static int in_process(int number);
static void named(char* out, const char* what, unsigned pid, unsigned n) {
  snprintf(out, 40, "/tw%.8s-%s-%u-%u-%d", tag(), what, pid, n, in_machine(current - 1));
}
static int device_of(const char* name) { return in_process(atoi(strrchr(name, '-') + 1)); }
static void* shared(const char* name, size_t* size, int create) {
  int fd = shm_open(name, create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
  if (fd < 0) return 0;
  struct stat s;
  if (create && ftruncate(fd, *size)) {
    close(fd);
    return 0;
  }
  fstat(fd, &s);
  *size = s.st_size;
  void* at = mmap(0, *size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return at == MAP_FAILED ? 0 : at;
}
static Range* add(Ptr base, size_t size, const char* name, int kind) {
  Range* r = calloc(1, sizeof *r);
  r->base = base, r->size = size, r->kind = kind, r->next = ranges, ranges = r;
  snprintf(r->name, sizeof r->name, "%s", name);
  r->device = device_of(name), r->id = ++identities;
  return r;
}
static Range* find(Ptr p) {
  for (Range* r = ranges; r; r = r->next)
    if (p >= r->base && p < r->base + r->size) return r;
  return 0;
}
static int in(const void* p, size_t n) {
  Ptr end = (Ptr)p + n;
  Range* r = find((Ptr)p);
  while (r && r->kind == MAPPED && end > r->base + r->size) {  // several mappings are one memory
    Range* next = find(r->base + r->size);
    r = next && next->kind == MAPPED ? next : 0;
  }
  return r && end <= r->base + r->size;
}
// What a kernel named "gate" waits for: that its number is another than 0, or not there any more.
static int is_open(Ptr gate) { return !find(gate) || *(volatile int64_t*)gate; }
static size_t used(void) {
  size_t n = 0;
  for (Range* r = ranges; r; r = r->next)
    if (r->kind == LEGACY || r->kind == POOLED) n += r->size;
  return n;
}
static R drop(Ptr p) {
  for (Range** at = &ranges; *at; at = &(*at)->next)
    if ((*at)->base == p) {
      Range* r = *at;
      *at = r->next;
      munmap((void*)r->base, r->size);
      if (r->kind == LEGACY || r->kind == POOLED) shm_unlink(r->name);
      free(r);
      return OK;
    }
  return INVALID_VALUE;
}
__attribute__((destructor)) static void end(void) {
  for (Range* r = ranges; r; r = r->next)
    if (r->kind == LEGACY || r->kind == POOLED) shm_unlink(r->name);
}
static R make(Ptr* out, size_t size, int kind, const char* what) {
  if (!size) return INVALID_VALUE;
  size_t full = (size + 4095) & ~4095ull;
  if (used() + full > MEMORY) return OOM;
  char name[40];
  named(name, what, getpid(), ++serial);
  void* at = shared(name, &full, 1);
  if (!at) return OOM;
  memset(at, 0xAB, full);  // fresh memory has any content
  *out = (Ptr)at;
  add(*out, full, name, kind);
  return OK;
}

// Functions and what they do.
typedef struct {
  unsigned grid[3], block[3], shared, cluster;
  int dependent;
} Shape;
typedef struct Func Func;
typedef struct Op {
  int kind;
  Ptr a, b;
  size_t n;
  unsigned char value;
  Func* func;
  Shape shape;
  void* params;
  struct Event* event;
  uint64_t target;
  void* job;
  struct Op* next;
} Op;
enum { COPY, SET, FREE, LAUNCH, RECORD, WAIT, AWAIT_VALUE, WRITE_VALUE };
typedef struct {
  uint64_t recorded, completed;
  double time;
} State;
typedef struct Event {
  State* state;
  int shared, foreign, untimed;
  char name[40];
} Event;
// An object that is destroyed with the last graph, and the last executable form, that has it.
typedef struct {
  void* object;
  void (*destroy)(void*);
  int references;
} Owned;
typedef struct {
  Owned* items[16];
  int count;
} OwnedList;
typedef struct Graph {
  Op* nodes[64];
  int count;
  OwnedList owned;
} Graph;
typedef struct {
  Op* origin[64];
  Op copy[64];
  int count;
  OwnedList owned;
} Exec;
static R own_object(Owned** out, void* object, void (*destroy)(void*), unsigned references, unsigned flags) {
  if (!object || !destroy || !references || flags != 1) return INVALID_VALUE;
  *out = calloc(1, sizeof **out);
  **out = (Owned){object, destroy, (int)references};
  return OK;
}
static R keep_owned(Graph* g, Owned* item, unsigned references, unsigned flags) {
  // Flag 1: the caller's reference moves to the graph.
  if (!g || !item || references != 1 || flags > 1 || g->owned.count == 16) return INVALID_VALUE;
  if (!flags) item->references++;
  g->owned.items[g->owned.count++] = item;
  return OK;
}
static void share_owned(OwnedList* to, const OwnedList* from) {
  *to = *from;
  for (int i = 0; i < to->count; i++) to->items[i]->references++;
}
static void drop_owned(OwnedList* list) {
  for (int i = 0; i < list->count; i++)
    if (!--list->items[i]->references) {
      list->items[i]->destroy(list->items[i]->object);
      free(list->items[i]);
    }
  list->count = 0;
}
static __thread int capture_mode;  // of the thread's calls beside captures; 2 allows all
static unsigned long long capture_serial;
typedef struct Stream {
  Op *head, *tail;
  Graph* capture;
  unsigned long long id, capture_id, context;
  int blocking, device;
  struct Stream* next;
} Stream;
static Stream* streams;

static int launch_ready(Op* op);    // whether the launch may end now; called again and again
static R launch_perform(Op* op);    // ends it; an error is sticky

static int ready(Op* op) {
  if (op->kind == WAIT) return op->event->state->completed >= op->target;
  if (op->kind == AWAIT_VALUE) return __atomic_load_n((uint64_t*)op->a, __ATOMIC_ACQUIRE) >= op->target;
  return op->kind != LAUNCH || launch_ready(op);
}
static void perform(Op* op) {
  switch (op->kind) {
    case COPY:
      memcpy((void*)op->a, (void*)op->b, op->n);
      break;
    case SET:
      memset((void*)op->a, op->value, op->n);
      break;
    case FREE:
      drop(op->a);
      break;
    case LAUNCH:
      sticky = launch_perform(op);
      break;
    case RECORD:
      if (op->event->state->completed < op->target) op->event->state->completed = op->target;
      op->event->state->time = now();
      break;
    case WRITE_VALUE:
      __atomic_store_n((uint64_t*)op->a, op->target, __ATOMIC_RELEASE);
      break;
  }
}
static void pump(void) {
  for (Stream* s = streams; s; s = s->next)
    while (s->head && !sticky && ready(s->head)) {
      Op* op = s->head;
      perform(op);
      s->head = op->next;
      if (!s->head) s->tail = 0;
      free(op->params);
      free(op);
    }
}
static R put(Stream* s, Op op) {
  if (!s) return INVALID_HANDLE;
  Op* o = malloc(sizeof *o);
  *o = op, o->next = 0;
  if (s->capture) {
    if (op.kind != LAUNCH && op.kind != SET) return CAPTURE_UNSUPPORTED;
    s->capture->nodes[s->capture->count++] = o;
    return OK;
  }
  if (s->tail) s->tail->next = o;
  else s->head = o;
  s->tail = o;
  pump();
  return OK;
}
static void nap(void) {
  pthread_mutex_unlock(&lock);
  usleep(200);
  pthread_mutex_lock(&lock);
}

// A libcuda.so.1 for tests on machines without a GPU: devices (TW_SIM_DEVICES of them) whose memory is the host's.
//
// Streams are queues that run as far as they can whenever anybody asks, events and memory pass between processes, and
// kernels are C functions chosen by the name of the entry in the (real) binary. What the driver checks of its arguments
// and of its caller's state (current context, capture, size of mappings) is checked here too.
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
enum { OK = 0, INVALID_VALUE = 1, OOM = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
       NOT_READY = 600, ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900, INVALID_CLUSTER = 912, INVALID_IMAGE = 200 };
#define MEMORY (192ull << 20)
#define SHARED_MAX 232448

static pthread_mutex_t lock;
static __thread int current;  // the device whose context it is, counted from 1
static int sticky;
#define ENTER if (!current) return INVALID_CONTEXT; Guard guard __attribute__((cleanup(leave))) = enter(); if (sticky) return sticky
typedef int Guard;
static Guard enter(void) { pthread_mutex_lock(&lock); return 0; }
static void leave(Guard* g) { (void)g; pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void begin(void) {
  pthread_mutexattr_t a;
  pthread_mutexattr_init(&a);
  pthread_mutexattr_settype(&a, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&lock, &a);
}
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec * 1e-6; }

// Shared memory by name, so that other processes find it.
typedef struct Range { Ptr base; size_t size; char name[40]; int kind, pool, device; struct Range* next; } Range;
enum { LEGACY = 1, POOLED, IMPORTED, MAPPED };
static Range* ranges;
static unsigned serial;
// TW_SIM_TAG tells the names of one run from another's, so that what is left over can be removed.
static const char* tag(void) { const char* t = getenv("TW_SIM_TAG"); return t ? t : "sim"; }
static void named(char* out, const char* what, unsigned pid, unsigned n) { snprintf(out, 40, "/tw%.8s-%s-%u-%u-%d", tag(), what, pid, n, current - 1); }
static int device_of(const char* name) { return atoi(strrchr(name, '-') + 1); }
static void* shared(const char* name, size_t* size, int create) {
  int fd = shm_open(name, create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
  if (fd < 0) return 0;
  struct stat s;
  if (create && ftruncate(fd, *size)) { close(fd); return 0; }
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
  r->device = device_of(name);
  return r;
}
static Range* find(Ptr p) { for (Range* r = ranges; r; r = r->next) if (p >= r->base && p < r->base + r->size) return r; return 0; }
static size_t used(void) { size_t n = 0; for (Range* r = ranges; r; r = r->next) if (r->kind == LEGACY || r->kind == POOLED) n += r->size; return n; }
static R drop(Ptr p) {
  for (Range** at = &ranges; *at; at = &(*at)->next) if ((*at)->base == p) {
    Range* r = *at;
    *at = r->next;
    munmap((void*)r->base, r->size);
    if (r->kind == LEGACY || r->kind == POOLED) shm_unlink(r->name);
    free(r);
    return OK;
  }
  return INVALID_VALUE;
}
__attribute__((destructor)) static void end(void) { for (Range* r = ranges; r; r = r->next) if (r->kind == LEGACY || r->kind == POOLED) shm_unlink(r->name); }
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
typedef struct { unsigned grid[3], block[3], shared, cluster; int dependent; } Shape;
typedef struct { const char* name; size_t params; int (*run)(const void*, const Shape*); } Kernel;
typedef struct { const Kernel* kernel; unsigned shared_max; char name[64]; void* module; } Func;
typedef struct Op { int kind; Ptr a, b; size_t n; unsigned char value; Func* func; Shape shape; void* params; struct Event* event; uint64_t target; struct Op* next; } Op;
enum { COPY, SET, FREE, LAUNCH, RECORD, WAIT };
typedef struct { uint64_t recorded, completed; double time; } State;
typedef struct Event { State* state; int shared, foreign; char name[40]; } Event;
typedef struct Graph { Op* nodes[64]; int count; } Graph;
typedef struct { Op* origin[64]; Op copy[64]; int count; } Exec;
typedef struct Stream { Op *head, *tail; Graph* capture; struct Stream* next; } Stream;
static Stream* streams;

static int ready(Op* op) {
  if (op->kind == WAIT) return op->event->state->completed >= op->target;
  if (op->kind == LAUNCH && !strcmp(op->func->name, "gate")) { Range* r = find(*(Ptr*)op->params); return !r || **(int64_t**)op->params; }
  return 1;
}
static void perform(Op* op) {
  switch (op->kind) {
    case COPY: memcpy((void*)op->a, (void*)op->b, op->n); break;
    case SET: memset((void*)op->a, op->value, op->n); break;
    case FREE: drop(op->a); break;
    case LAUNCH: if (op->func->kernel->run(op->params, &op->shape)) sticky = ILLEGAL_ADDRESS; break;
    case RECORD: if (op->event->state->completed < op->target) op->event->state->completed = op->target; op->event->state->time = now(); break;
  }
}
static void pump(void) {
  for (Stream* s = streams; s; s = s->next) while (s->head && !sticky && ready(s->head)) {
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
    if (op.kind != LAUNCH) return CAPTURE_UNSUPPORTED;
    s->capture->nodes[s->capture->count++] = o;
    return OK;
  }
  if (s->tail) s->tail->next = o; else s->head = o;
  s->tail = o;
  pump();
  return OK;
}
static void nap(void) { pthread_mutex_unlock(&lock); usleep(200); pthread_mutex_lock(&lock); }

static int in(const void* p, size_t n) { Range* r = find((Ptr)p); return r && (Ptr)p + n <= r->base + r->size; }
typedef struct { const float *x, *y; float* out; int64_t n; } Vectors;
static int k_add(const void* p, const Shape* s) {
  const Vectors* v = p;
  (void)s;
  if (!in(v->x, v->n * 4) || !in(v->y, v->n * 4) || !in(v->out, v->n * 4)) return 1;
  for (int64_t i = 0; i < v->n; i++) v->out[i] = v->x[i] + v->y[i];
  return 0;
}
static int k_count(const void* p, const Shape* s) { int64_t* out = *(int64_t**)p; (void)s; if (!in(out, 24)) return 1; out[0]++, out[1] = out[2] = 1; return 0; }
typedef struct { int64_t* out; } Out;
static int k_cluster(const void* p, const Shape* s) { int64_t* out = ((const Out*)p)->out; if (!in(out, s->grid[0] * 8)) return 1; for (unsigned i = 0; i < s->grid[0]; i++) out[i] = s->cluster; return 0; }
static int k_shared(const void* p, const Shape* s) { int64_t* out = ((const Out*)p)->out; if (!in(out, 8)) return 1; *out = s->shared / 4; return 0; }
typedef struct { const float* x; int64_t n; } Row;
typedef struct { const Row* rows; int64_t count; float* out; } Rows;
static int k_table(const void* p, const Shape* s) {
  const Rows* r = p;
  (void)s;
  if (!in(r->rows, r->count * sizeof(Row)) || !in(r->out, r->count * 4)) return 1;
  for (int64_t i = 0; i < r->count; i++) { float sum = 0; if (!in(r->rows[i].x, r->rows[i].n * 4)) return 1; for (int64_t j = 0; j < r->rows[i].n; j++) sum += r->rows[i].x[j]; r->out[i] = sum; }
  return 0;
}
typedef struct { int32_t* counter; int64_t* out; } Counted;
static int k_last(const void* p, const Shape* s) { const Counted* c = p; if (!in(c->counter, 4) || !in(c->out, 8) || *c->counter) return 1; *c->out += s->grid[0]; return 0; }
static int k_gate(const void* p, const Shape* s) { const Out* o = p; (void)s; return !in(o->out, 8); }
static int k_fault(const void* p, const Shape* s) { (void)p, (void)s; return 1; }
typedef struct __attribute__((packed)) { uint64_t magic, address, rank, sizes[5]; char rest[64]; } Map;
typedef struct { Map map; float* out; } Mapped;
static int k_tile(const void* p, const Shape* s) {
  const Mapped* m = p;
  (void)s;
  if (m->map.magic != 0x7473 || !in((void*)m->map.address, 64 * 4) || !in(m->out, 64 * 4)) return 1;
  for (int row = 0; row < 8; row++) memcpy(m->out + row * 8, (float*)m->map.address + row * m->map.sizes[0], 32);
  return 0;
}
static const Kernel kernels[] = {{"add", 32, k_add}, {"count", 8, k_count}, {"cluster", 8, k_cluster}, {"shared_bytes", 8, k_shared}, {"table", 24, k_table},
  {"last", 16, k_last}, {"gate", 8, k_gate}, {"fault", 8, k_fault}, {"tile", 192, k_tile}, {"then_add", 32, k_add}};

// The driver's interface.
R cuInit(unsigned f) { return f ? INVALID_VALUE : OK; }
R cuGetExportTable(const void** table, const void* id) { (void)id; *table = 0; return NOT_FOUND; }  // NVRTC asks
R cuDriverGetVersion(int* v) { *v = getenv("TW_SIM_DRIVER") ? atoi(getenv("TW_SIM_DRIVER")) : 13000; return OK; }
R cuDeviceGetCount(int* n) { const char* seen = getenv("CUDA_VISIBLE_DEVICES"); *n = seen && !*seen ? 0 : getenv("TW_SIM_DEVICES") ? atoi(getenv("TW_SIM_DEVICES")) : 1; return OK; }
R cuDeviceGet(int* d, int n) { *d = n; return OK; }
R cuDeviceGetName(char* s, int n, int d) { (void)d; snprintf(s, n, "Simulated H200"); return OK; }
R cuDeviceGetUuid_v2(unsigned char* u, int d) { for (int i = 0; i < 16; i++) u[i] = 0xA0 + i + 16 * d; return OK; }
R cuDeviceTotalMem_v2(size_t* n, int d) { (void)d; *n = MEMORY; return OK; }
R cuDeviceGetAttribute(int* v, int a, int d) {
  (void)d;
  switch (a) { case 13: *v = 1980000; break; case 16: *v = 132; break; case 36: *v = 3201000; break; case 37: *v = 6144; break; case 38: *v = 50 << 20; break;
    case 75: *v = 9; break; case 76: *v = 0; break; case 97: *v = SHARED_MAX; break; case 102: case 103: case 115: *v = 1; break; default: *v = 0; }
  return OK;
}
R cuGetErrorName(R r, const char** s) { *s = r == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN"; return OK; }
static void* run(void* unused) { for (;;) { usleep(500); pthread_mutex_lock(&lock); pump(); pthread_mutex_unlock(&lock); } return unused; }
R cuDevicePrimaryCtxRetain(void** c, int d) {
  static int running;
  pthread_t thread;
  if (!running++ && !pthread_create(&thread, 0, run, 0)) pthread_detach(thread);  // the device works by itself
  *c = (void*)(0x1000ull + d);
  return OK;
}
R cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return OK; }
R cuCtxSetCurrent(void* c) { if ((Ptr)c < 0x1000 || (Ptr)c > 0x1010) return INVALID_CONTEXT; current = (Ptr)c - 0x1000 + 1; return sticky; }

R cuStreamCreate(Stream** s, unsigned f) { ENTER; if (f != 1) return INVALID_VALUE; *s = calloc(1, sizeof **s); (*s)->next = streams, streams = *s; return OK; }
R cuStreamDestroy_v2(Stream* s) {
  ENTER;
  pump();
  if (s->head) { fprintf(stderr, "sim: a busy stream was destroyed\n"); abort(); }
  for (Stream** at = &streams; *at; at = &(*at)->next) if (*at == s) { *at = s->next; free(s); return OK; }
  return INVALID_HANDLE;
}
R cuStreamQuery(Stream* s) { ENTER; if (s->capture) return CAPTURE_UNSUPPORTED; pump(); return sticky ? sticky : s->head ? NOT_READY : OK; }
R cuStreamSynchronize(Stream* s) { ENTER; for (pump(); s->head && !sticky; pump()) nap(); return sticky; }
R cuStreamWaitEvent(Stream* s, Event* e, unsigned f) { ENTER; if (!e || f) return INVALID_VALUE; return put(s, (Op){.kind = WAIT, .event = e, .target = e->state->recorded}); }
R cuStreamBeginCapture_v2(Stream* s, int mode) { ENTER; if (mode != 2 || s->head) return INVALID_VALUE; s->capture = calloc(1, sizeof(Graph)); return OK; }
R cuStreamEndCapture(Stream* s, Graph** g) { ENTER; if (!s->capture) return INVALID_VALUE; *g = s->capture, s->capture = 0; return OK; }
R cuStreamGetCaptureInfo_v3(Stream* s, int* status, uint64_t* id, Graph** g, Op*** deps, void** edges, size_t* n) {
  ENTER;
  static char edge[64];
  *status = s->capture ? 1 : 0, *id = 1, *g = s->capture, *edges = edge;
  *n = s->capture && s->capture->count ? 1 : 0;
  if (*n) *deps = &s->capture->nodes[s->capture->count - 1];
  return OK;
}

R cuEventCreate(Event** e, unsigned f) {
  ENTER;
  *e = calloc(1, sizeof **e);
  (*e)->shared = !!(f & 4);
  if (f & 4 && !(f & 2)) return INVALID_VALUE;
  size_t size = sizeof(State);
  if (f & 4) { named((*e)->name, "e", getpid(), ++serial); (*e)->state = shared((*e)->name, &size, 1); }
  else (*e)->state = calloc(1, size);
  return OK;
}
R cuEventDestroy_v2(Event* e) { ENTER; if (e->shared && !e->foreign) shm_unlink(e->name); return OK; }  // may be in use still
R cuEventRecord(Event* e, Stream* s) { ENTER; if (!e) return INVALID_HANDLE; return put(s, (Op){.kind = RECORD, .event = e, .target = ++e->state->recorded}); }
R cuEventQuery(Event* e) { ENTER; pump(); return sticky ? sticky : e->state->completed < e->state->recorded ? NOT_READY : OK; }
R cuEventSynchronize(Event* e) { ENTER; for (pump(); !sticky && e->state->completed < e->state->recorded; pump()) nap(); return sticky; }
R cuEventElapsedTime_v2(float* ms, Event* a, Event* b) { ENTER; if (a->shared || !a->state->recorded || !b->state->recorded) return INVALID_HANDLE; *ms = b->state->time - a->state->time + 0.001f; return OK; }
R cuIpcGetEventHandle(char* h, Event* e) { ENTER; if (!e->shared) return INVALID_HANDLE; memset(h, 0xEE, 64); memcpy(h, e->name, 40); return OK; }
typedef struct { char bytes[64]; } Handle;
R cuIpcOpenEventHandle(Event** e, Handle h) {
  ENTER;
  size_t size;
  h.bytes[39] = 0;
  State* s = shared(h.bytes, &size, 0);
  if (!s) return INVALID_HANDLE;
  *e = calloc(1, sizeof **e);
  (*e)->state = s, (*e)->shared = (*e)->foreign = 1;
  return OK;
}

typedef struct { int alloc, handles; struct { int type, id; } location; void* w; size_t max; char rest[64]; } PoolProps;
typedef struct { int exportable, imported; } Pool;
R cuMemPoolCreate(Pool** p, const PoolProps* x) { ENTER; if (x->alloc != 1 || x->location.type != 1 || x->location.id != current - 1) return INVALID_VALUE; *p = calloc(1, sizeof **p); (*p)->exportable = x->handles; return OK; }
R cuMemPoolDestroy(Pool* p) { ENTER; (void)p; return OK; }
R cuMemPoolSetAttribute(Pool* p, int a, uint64_t* v) { ENTER; return p && a == 4 && *v ? OK : INVALID_VALUE; }
R cuMemPoolGetAttribute(Pool* p, int a, uint64_t* v) { ENTER; (void)p, (void)a; *v = used(); return OK; }
R cuMemPoolTrimTo(Pool* p, size_t n) { ENTER; (void)p, (void)n; return OK; }
R cuMemPoolGetAccess(int* f, Pool* p, void* l) { ENTER; (void)l; *f = p->imported ? 0 : 3; return OK; }
R cuMemPoolSetAccess(Pool* p, void* d, size_t n) { ENTER; if (n != 1 || ((int*)d)[0] != 1 || ((int*)d)[2] != 3) return INVALID_VALUE; p->imported = 2; return OK; }
R cuMemAllocFromPoolAsync(Ptr* out, size_t n, Pool* p, Stream* s) { ENTER; if (!p || !s) return INVALID_VALUE; R r = make(out, n, POOLED, "p"); if (!r) find(*out)->pool = p->exportable; return r; }
R cuMemFreeAsync(Ptr p, Stream* s) { ENTER; if (!find(p)) return INVALID_VALUE; return put(s, (Op){.kind = FREE, .a = p}); }
R cuMemPoolExportToShareableHandle(int* fd, Pool* p, int type, unsigned long long f) { ENTER; if (!p->exportable || type != 1 || f) return INVALID_VALUE; *fd = eventfd(1, EFD_CLOEXEC); return OK; }
R cuMemPoolImportFromShareableHandle(Pool** p, void* fd, int type, unsigned long long f) { ENTER; if (type != 1 || f || fcntl((int)(intptr_t)fd, F_GETFD) < 0) return INVALID_VALUE; *p = calloc(1, sizeof **p); (*p)->imported = 1; return OK; }
R cuMemPoolExportPointer(char* data, Ptr p) { ENTER; Range* r = find(p); if (!r || !r->pool) return INVALID_VALUE; memset(data, 0xDD, 64); memcpy(data, r->name, 40); return OK; }
static R import(Ptr* out, const char* name) { size_t n; void* at = shared(name, &n, 0); if (!at) return INVALID_VALUE; *out = (Ptr)at; add(*out, n, name, IMPORTED); return OK; }
R cuMemPoolImportPointer(Ptr* out, Pool* p, const char* data) { ENTER; char name[40]; memcpy(name, data, 40); name[39] = 0; return p->imported != 2 ? INVALID_VALUE : import(out, name); }
R cuMemAlloc_v2(Ptr* out, size_t n) { ENTER; return make(out, n, LEGACY, "m"); }
R cuMemFree_v2(Ptr p) { ENTER; return drop(p); }
R cuMemsetD8Async(Ptr p, unsigned char v, size_t n, Stream* s) { ENTER; if (!in((void*)p, n)) return INVALID_VALUE; return put(s, (Op){.kind = SET, .a = p, .value = v, .n = n}); }
R cuMemcpyHtoDAsync_v2(Ptr d, const void* h, size_t n, Stream* s) {
  ENTER;
  if (!in((void*)d, n)) return INVALID_VALUE;
  if (n > 65536 && s->head) { fprintf(stderr, "sim: a large copy behind other work would wait for it\n"); abort(); }
  void* staged = malloc(n);
  memcpy(staged, h, n);
  return put(s, (Op){.kind = COPY, .a = d, .b = (Ptr)staged, .n = n, .params = staged});
}
R cuMemcpyDtoHAsync_v2(void* h, Ptr d, size_t n, Stream* s) { ENTER; if (!in((void*)d, n)) return INVALID_VALUE; return put(s, (Op){.kind = COPY, .a = (Ptr)h, .b = d, .n = n}); }
R cuMemHostRegister_v2(void* p, size_t n, unsigned f) { ENTER; return p && n && !f ? OK : INVALID_VALUE; }
R cuMemHostUnregister(void* p) { ENTER; return p ? OK : INVALID_VALUE; }
R cuMemGetAddressRange_v2(Ptr* b, size_t* n, Ptr p) { ENTER; Range* r = find(p); if (!r) return NOT_FOUND; *b = r->base, *n = r->size; return OK; }
R cuPointerGetAttribute(void* out, int a, Ptr p) { ENTER; if (!find(p) || a != 9) return INVALID_VALUE; *(int*)out = find(p)->device; return OK; }
R cuIpcGetMemHandle(char* h, Ptr p) { ENTER; Range* r = find(p); if (!r || r->kind != LEGACY) return INVALID_VALUE; memset(h, 0xCC, 64); memcpy(h, r->name, 40); return OK; }
R cuIpcOpenMemHandle_v2(Ptr* out, Handle h, unsigned f) {
  ENTER;
  char any[40], own[40];
  h.bytes[39] = 0;
  snprintf(any, sizeof any, "/tw%.8s-m-", tag());
  snprintf(own, sizeof own, "/tw%.8s-m-%u-", tag(), getpid());
  if (f != 1 || strncmp(h.bytes, any, strlen(any))) return INVALID_VALUE;
  return strncmp(h.bytes, own, strlen(own)) ? import(out, h.bytes) : INVALID_CONTEXT;
}
R cuIpcCloseMemHandle(Ptr p) { ENTER; Range* r = find(p); return r && r->kind == IMPORTED ? drop(p) : INVALID_VALUE; }

// Virtual memory: a descriptor carries the numbers of a name.
typedef struct { unsigned pid, n; size_t size; int device; } Alloc;
static void name_of(char* out, const Alloc* a) { snprintf(out, 40, "/tw%.8s-v-%u-%u-%d", tag(), a->pid, a->n, a->device); }
typedef struct { int type, handles; struct { int type, id; } location; char rest[64]; } Prop;
R cuMemGetAllocationGranularity(size_t* g, const Prop* p, int o) { ENTER; if (p->location.type != 1 || o) return INVALID_VALUE; *g = 2 << 20; return OK; }
R cuMemCreate(Alloc** a, size_t n, const Prop* p, unsigned long long f) {
  ENTER;
  if (n % (2 << 20) || p->type != 1 || f) return INVALID_VALUE;
  char name[40];
  *a = calloc(1, sizeof **a);
  (*a)->pid = getpid(), (*a)->n = ++serial, (*a)->size = n, (*a)->device = p->location.id;
  name_of(name, *a);
  void* at = shared(name, &n, 1);
  munmap(at, n);
  return OK;
}
R cuMemRelease(Alloc* a) { ENTER; free(a); return OK; }
R cuMemExportToShareableHandle(int* fd, Alloc* a, int type, unsigned long long f) { ENTER; if (type != 1 || f) return INVALID_VALUE; uint64_t v = (uint64_t)a->pid << 32 | a->n << 4 | a->device; *fd = eventfd(0, EFD_CLOEXEC); return write(*fd, &v, 8) == 8 ? OK : INVALID_VALUE; }
R cuMemImportFromShareableHandle(Alloc** a, void* fd, int type) {
  ENTER;
  uint64_t v;
  int at = (int)(intptr_t)fd;
  if (type != 1 || read(at, &v, 8) != 8 || write(at, &v, 8) != 8) return INVALID_VALUE;
  char name[40];
  *a = calloc(1, sizeof **a);
  (*a)->pid = v >> 32, (*a)->n = (unsigned)v >> 4, (*a)->device = v & 15;
  name_of(name, *a);
  void* m = shared(name, &(*a)->size, 0);
  if (!m) return INVALID_VALUE;
  munmap(m, (*a)->size);
  return OK;
}
R cuMemGetAllocationPropertiesFromHandle(Prop* p, Alloc* a) { ENTER; memset(p, 0, 32); p->type = p->handles = p->location.type = 1, p->location.id = a->device; return OK; }
R cuMemAddressReserve(Ptr* out, size_t n, size_t align, Ptr at, unsigned long long f) { ENTER; if (align || at || f) return INVALID_VALUE; void* p = mmap(0, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); *out = (Ptr)p; return p == MAP_FAILED ? OOM : OK; }
R cuMemAddressFree(Ptr p, size_t n) { ENTER; return munmap((void*)p, n) ? INVALID_VALUE : OK; }
R cuMemMap(Ptr p, size_t n, size_t offset, Alloc* a, unsigned long long f) {
  ENTER;
  char name[40];
  if (n > a->size || offset || f || n % (2 << 20)) return INVALID_VALUE;
  name_of(name, a);
  int fd = shm_open(name, O_RDWR, 0600);
  if (fd < 0) return INVALID_VALUE;
  void* at = mmap((void*)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return INVALID_VALUE;
  add(p, n, name, MAPPED);
  return OK;
}
R cuMemSetAccess(Ptr p, size_t n, const int* d, size_t count) { ENTER; if (count != 1 || d[0] != 1 || d[1] != current - 1 || d[2] != 3) return INVALID_VALUE; return mprotect((void*)p, n, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK; }
R cuMemUnmap(Ptr p, size_t n) { ENTER; Range* r = find(p); if (!r || r->size != n || r->kind != MAPPED) return INVALID_VALUE; drop(p); return mmap((void*)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED; }

// A binary's section by name, and the size of a kernel's parameter as the compiler noted it (EIATTR_KPARAM_INFO).
static const char* section(const char* image, const char* name, size_t* size) {
  const char* heads = image + *(uint64_t*)(image + 40);
  const unsigned each = *(uint16_t*)(image + 58), count = *(uint16_t*)(image + 60), strings = *(uint16_t*)(image + 62);
  const char* names = image + *(uint64_t*)(heads + strings * each + 24);
  for (unsigned i = 0; i < count; i++) {
    const char* head = heads + i * each;
    if (!strcmp(names + *(uint32_t*)head, name)) { *size = *(uint64_t*)(head + 32); return image + *(uint64_t*)(head + 24); }
  }
  return 0;
}
static size_t param_bytes(const char* image, const char* kernel) {
  char name[512];
  size_t size = 0;
  snprintf(name, sizeof name, ".nv.info.%s", kernel);
  const unsigned char* at = (const unsigned char*)section(image, name, &size);
  for (const unsigned char* end = at + size; at && at < end; at += at[0] == 4 ? 4 + (at[2] | at[3] << 8) : 4)
    if (at[0] == 4 && at[1] == 0x17) return *(uint32_t*)(at + 12) >> 18;
  return 0;
}
// Kernels that this file does not know take arguments, and do nothing.
static int k_nothing(const void* p, const Shape* s) { (void)p, (void)s; return 0; }

typedef struct { char* image; size_t size; } Module;
R cuModuleLoadData(Module** m, const char* image) {
  ENTER;
  if (memcmp(image, "\177ELF", 4) || image[18] != (char)190) return INVALID_IMAGE;  // EM_CUDA
  uint64_t sections = *(uint64_t*)(image + 40), size = sections + (uint64_t)*(uint16_t*)(image + 58) * *(uint16_t*)(image + 60);
  *m = calloc(1, sizeof **m);
  (*m)->image = memcpy(malloc(size), image, size), (*m)->size = size;
  return OK;
}
R cuModuleUnload(Module* m) { ENTER; for (Stream* s = streams; s; s = s->next) for (Op* o = s->head; o; o = o->next) if (o->kind == LAUNCH && o->func->module == m) { fprintf(stderr, "sim: a module was unloaded under way\n"); abort(); } free(m->image); free(m); return OK; }
R cuModuleGetFunction(Func** f, Module* m, const char* name) {
  ENTER;
  char text[512];
  size_t size;
  snprintf(text, sizeof text, ".text.%s", name);
  if (!section(m->image, text, &size)) return NOT_FOUND;
  Kernel* k = calloc(1, sizeof *k);
  *k = (Kernel){"", param_bytes(m->image, name), k_nothing};
  for (unsigned i = 0; i < sizeof kernels / sizeof *kernels; i++) if (!strcmp(kernels[i].name, name)) {
    if (kernels[i].params != k->params) { fprintf(stderr, "sim: parameters of %s\n", name); abort(); }
    *k = kernels[i];
  }
  *f = calloc(1, sizeof **f);
  (*f)->kernel = k, (*f)->shared_max = 49152, (*f)->module = m;
  snprintf((*f)->name, sizeof (*f)->name, "%s", name);
  return OK;
}
R cuFuncGetParamInfo(Func* f, size_t i, size_t* offset, size_t* size) { ENTER; if (i) return INVALID_VALUE; *offset = f->kernel->params % 64 ? 0 : 48, *size = f->kernel->params; return OK; }
R cuFuncLoad(Func* f) { ENTER; return f ? OK : INVALID_VALUE; }
R cuFuncSetAttribute(Func* f, int a, int v) { ENTER; if (a == 8) { if (v > SHARED_MAX) return INVALID_VALUE; f->shared_max = v; } else if (a != 14) return INVALID_VALUE; return OK; }

typedef struct { int id, pad; union { unsigned dim[3]; int flag; char bytes[64]; } value; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; Stream* stream; Attribute* attrs; unsigned count; } Config;
R cuLaunchKernelEx(const Config* c, Func* f, void** params, void** extra) {
  ENTER;
  Shape s = {.shared = c->shared, .cluster = 1};
  memcpy(s.grid, c->grid, 12), memcpy(s.block, c->block, 12);
  for (unsigned i = 0; i < c->count; i++) {
    if (c->attrs[i].id == 4) { unsigned* d = c->attrs[i].value.dim; if (!d[0] || !d[1] || !d[2] || s.grid[0] % d[0]) return INVALID_CLUSTER; s.cluster = d[0] * d[1] * d[2]; }
    else if (c->attrs[i].id == 6) s.dependent = c->attrs[i].value.flag;
    else return INVALID_VALUE;
  }
  if (extra || !f || !s.grid[0] || !s.grid[1] || !s.grid[2] || !s.block[0] || s.block[0] * s.block[1] * s.block[2] > 1024 || s.shared > f->shared_max) return INVALID_VALUE;
  void* copy = malloc(f->kernel->params);
  memcpy(copy, params[0], f->kernel->params);
  return put(c->stream, (Op){.kind = LAUNCH, .func = f, .shape = s, .params = copy});
}
R cuLaunchKernel(Func* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream* s, void** params, void** extra) {
  Config c = {{gx, gy, gz}, {bx, by, bz}, shared, s, 0, 0};
  return cuLaunchKernelEx(&c, f, params, extra);
}
R cuTensorMapEncodeTiled(Map* m, int type, unsigned rank, void* p, const uint64_t* dims, const uint64_t* strides, const unsigned* box, const unsigned* elements, int inter, int swizzle, int l2, int fill) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  (void)l2;
  if (!rank || rank > 5 || (Ptr)p % 16 || inter || fill || type < 0 || type > 9 || swizzle > 3) return INVALID_VALUE;
  for (unsigned i = 0; i < rank; i++) if (!dims[i] || !box[i] || box[i] > 256 || elements[i] != 1 || (i && strides[i - 1] % 16)) return INVALID_VALUE;
  if (box[0] * bytes[type] % 16 || (swizzle && box[0] * bytes[type] > 16u << swizzle)) return INVALID_VALUE;
  memset(m, 0, 128);
  m->magic = 0x7473, m->address = (uint64_t)p, m->rank = rank;
  memcpy(m->sizes, dims, rank * 8);
  return OK;
}

typedef struct { Func* func; unsigned grid[3], block[3], shared; void **params, **extra; void *kern, *ctx; } NodeParams;
R cuGraphInstantiateWithFlags(Exec** e, Graph* g, unsigned long long f) {
  ENTER;
  if (f || !g->count) return INVALID_VALUE;
  *e = calloc(1, sizeof **e);
  (*e)->count = g->count;
  for (int i = 0; i < g->count; i++) { (*e)->origin[i] = g->nodes[i]; (*e)->copy[i] = *g->nodes[i]; size_t n = g->nodes[i]->func->kernel->params; (*e)->copy[i].params = memcpy(malloc(n), g->nodes[i]->params, n); }
  return OK;
}
R cuGraphExecKernelNodeSetParams_v2(Exec* e, Op* node, const NodeParams* p) {
  ENTER;
  for (int i = 0; i < e->count; i++) if (e->origin[i] == node) {
    if (p->func != node->func || p->extra || p->shared != node->shape.shared || memcmp(p->grid, node->shape.grid, 12) || memcmp(p->block, node->shape.block, 12)) return INVALID_VALUE;
    memcpy(e->copy[i].params, p->params[0], p->func->kernel->params);
    return OK;
  }
  return INVALID_VALUE;
}
R cuGraphLaunch(Exec* e, Stream* s) {
  ENTER;
  for (int i = 0; i < e->count; i++) { Op op = e->copy[i]; size_t n = op.func->kernel->params; op.params = memcpy(malloc(n), e->copy[i].params, n); R r = put(s, op); if (r) return r; }
  return OK;
}
R cuGraphExecDestroy(Exec* e) { ENTER; free(e); return OK; }
R cuGraphDestroy(Graph* g) { ENTER; free(g); return OK; }

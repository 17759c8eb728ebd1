// Devices, contexts, streams and events.
#pragma once
static int in_machine(int device) { return device; }
static int in_process(int number) { return number; }
R cuInit(unsigned f) { return f ? INVALID_VALUE : OK; }
// NVRTC asks for it.
R cuGetExportTable(const void** table, const void* id) {
  (void)id;
  *table = 0;
  return NOT_FOUND;
}
R cuDriverGetVersion(int* v) {
  *v = getenv("TW_SIM_DRIVER") ? atoi(getenv("TW_SIM_DRIVER")) : 13000;
  return OK;
}
R cuDeviceGetCount(int* n) {
  const char* seen = getenv("CUDA_VISIBLE_DEVICES");
  *n = seen && !*seen ? 0 : getenv("TW_SIM_DEVICES") ? atoi(getenv("TW_SIM_DEVICES")) : 1;
  return OK;
}
R cuDeviceGet(int* d, int n) {
  *d = n;
  return OK;
}
R cuDeviceGetName(char* s, int n, int d) {
  (void)d;
  snprintf(s, n, "Simulated H200");
  return OK;
}
R cuDeviceGetUuid_v2(unsigned char* u, int d) {
  for (int i = 0; i < 16; i++) u[i] = 0xA0 + i + 16 * d;
  return OK;
}
R cuDeviceTotalMem_v2(size_t* n, int d) {
  (void)d;
  *n = MEMORY;
  return OK;
}
R cuDeviceGetAttribute(int* v, int a, int d) {
  (void)d;
  switch (a) {
    case 13:
      *v = 1980000;
      break;
    case 16:
      *v = 132;
      break;
    case 36:
      *v = 3201000;
      break;
    case 37:
      *v = 6144;
      break;
    case 38:
      *v = 50 << 20;
      break;
    case 75:
      *v = 9;
      break;
    case 76:
      *v = 0;
      break;
    case 97:
      *v = SHARED_MAX;
      break;
    case 102:
    case 103:
    case 115:
      *v = 1;
      break;
    default:
      *v = 0;
  }
  return OK;
}
R cuGetErrorName(R r, const char** s) {
  *s = r == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
  return OK;
}
R cuGetErrorString(R r, const char** s) {
  *s = r ? "a result of the simulated driver" : "no error";
  return OK;
}
static void* run(void* unused) {
  for (;;) {
    usleep(500);
    pthread_mutex_lock(&lock);
    pump();
    pthread_mutex_unlock(&lock);
  }
  return unused;
}
R cuDevicePrimaryCtxRetain(void** c, int d) {
  static int running;
  pthread_t thread;
  if (!running++ && !pthread_create(&thread, 0, run, 0)) pthread_detach(thread);  // the device works by itself
  *c = (void*)(0x1000ull + d);
  return OK;
}
R cuDevicePrimaryCtxRelease_v2(int d) {
  (void)d;
  return OK;
}
// Handles of contexts: the primary ones, and those that were created. Their numbers are never given twice.
static unsigned long long context_now(void) {
  return made_context ? 0x2000ull + made_context : 0x1000ull + current - 1;
}
static int contexts_made, context_device[256], context_before[256][2];  // what was current when it was made
R cuCtxCreate_v2(void** c, unsigned f, int d) {
  if (f || contexts_made == 255) return INVALID_VALUE;
  const int made = ++contexts_made;
  context_before[made][0] = current, context_before[made][1] = made_context;
  context_device[made] = d, current = d + 1, made_context = made;
  *c = (void*)context_now();
  return OK;
}
R cuCtxDestroy_v2(void* c) {
  const Ptr number = (Ptr)c - 0x2000;
  if (!number || number > (Ptr)contexts_made || context_gone[number]) return INVALID_CONTEXT;
  context_gone[number] = 1;
  if (made_context == (int)number) current = context_before[number][0], made_context = context_before[number][1];
  return OK;
}
R cuCtxSetCurrent(void* c) {
  if ((Ptr)c > 0x2000 && (Ptr)c <= 0x2000ull + contexts_made) {
    made_context = (Ptr)c - 0x2000, current = context_device[made_context] + 1;
    return context_gone[made_context] ? CONTEXT_GONE : sticky;
  }
  if (!c) return current = made_context = 0, OK;
  if ((Ptr)c < 0x1000 || (Ptr)c > 0x1010) return INVALID_CONTEXT;
  current = (Ptr)c - 0x1000 + 1, made_context = 0;
  return sticky;
}
R cuCtxGetCurrent(void** c) {
  *c = current ? (void*)context_now() : 0;
  return OK;
}
R cuCtxGetId(void* c, unsigned long long* id) {
  if (!c && !current) return INVALID_CONTEXT;
  *id = c ? (Ptr)c : context_now();
  return *id > 0x2000 && context_gone[*id - 0x2000] ? CONTEXT_GONE : OK;
}
R cuCtxGetDevice(int* d) {
  if (!current) return INVALID_CONTEXT;
  *d = current - 1;
  return OK;
}
R cuThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < 0 || *mode > 2) return INVALID_VALUE;
  const int before = capture_mode;
  capture_mode = *mode, *mode = before;
  return OK;
}

static unsigned long long stream_serial;
R cuStreamCreate(Stream** s, unsigned f) {
  ENTER;
  if (f != 1) return INVALID_VALUE;
  *s = calloc(1, sizeof **s);
  (*s)->next = streams, streams = *s, (*s)->id = ++stream_serial;
  (*s)->context = context_now();
  return OK;
}
R cuStreamGetId(Stream* s, unsigned long long* id) {
  ENTER;
  if (s && s->capture) return CAPTURE_UNSUPPORTED;  // as the driver says of a stream that is captured
  *id = s ? s->id : 0;
  return OK;
}
R cuStreamGetCtx(Stream* s, void** c) {
  ENTER;
  *c = (void*)s->context;
  return OK;
}
R cuStreamDestroy_v2(Stream* s) {
  ENTER;
  pump();
  if (s->head) {
    fprintf(stderr, "sim: a busy stream was destroyed\n");
    abort();
  }
  for (Stream** at = &streams; *at; at = &(*at)->next)
    if (*at == s) {
      *at = s->next;
      free(s);
      return OK;
    }
  return INVALID_HANDLE;
}
R cuStreamQuery(Stream* s) {
  ENTER;
  if (s->capture) return CAPTURE_UNSUPPORTED;
  pump();
  return sticky ? sticky : s->head ? NOT_READY : OK;
}
R cuStreamIsCapturing(Stream* s, int* status) {
  ENTER;
  *status = s->capture ? 1 : 0;
  return OK;
}
R cuStreamSynchronize(Stream* s) {
  ENTER;
  for (pump(); s->head && !sticky; pump()) nap();
  return sticky;
}
R cuStreamWaitEvent(Stream* s, Event* e, unsigned f) {
  ENTER;
  if (!e || f) return INVALID_VALUE;
  return put(s, (Op){.kind = WAIT, .event = e, .target = e->state->recorded});
}
R cuStreamBeginCapture_v2(Stream* s, int mode) {
  ENTER;
  if (mode != 2 || s->head) return INVALID_VALUE;
  s->capture = calloc(1, sizeof(Graph)), s->capture_id = ++capture_serial;
  return OK;
}
R cuStreamEndCapture(Stream* s, Graph** g) {
  ENTER;
  if (!s->capture) return INVALID_VALUE;
  *g = s->capture, s->capture = 0;
  return OK;
}
R cuStreamGetCaptureInfo_v2(Stream* s, int* status, uint64_t* id, Graph** g, Op*** deps, size_t* n) {
  ENTER;
  (void)deps, (void)n;
  *status = s && s->capture ? 1 : 0;
  if (id) *id = *status ? s->capture_id : 0;
  if (g) *g = *status ? s->capture : 0;
  return OK;
}
R cuStreamGetCaptureInfo_v3(Stream* s, int* status, uint64_t* id, Graph** g, Op*** deps, void** edges, size_t* n) {
  ENTER;
  static char edge[64];
  *status = s->capture ? 1 : 0, *id = s->capture_id, *g = s->capture, *edges = edge;
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
  if (f & 4) {
    named((*e)->name, "e", getpid(), ++serial);
    (*e)->state = shared((*e)->name, &size, 1);
  } else (*e)->state = calloc(1, size);
  return OK;
}
R cuEventDestroy_v2(Event* e) {
  ENTER;
  if (e->shared && !e->foreign) shm_unlink(e->name);
  return OK;
}  // may be in use still
R cuEventRecord(Event* e, Stream* s) {
  ENTER;
  if (!e) return INVALID_HANDLE;
  return put(s, (Op){.kind = RECORD, .event = e, .target = ++e->state->recorded});
}
R cuEventQuery(Event* e) {
  ENTER;
  pump();
  return sticky ? sticky : e->state->completed < e->state->recorded ? NOT_READY : OK;
}
R cuEventSynchronize(Event* e) {
  ENTER;
  for (pump(); !sticky && e->state->completed < e->state->recorded; pump()) nap();
  return sticky;
}
R cuEventElapsedTime_v2(float* ms, Event* a, Event* b) {
  ENTER;
  if (a->shared || !a->state->recorded || !b->state->recorded) return INVALID_HANDLE;
  *ms = b->state->time - a->state->time + 0.001f;
  return OK;
}
R cuIpcGetEventHandle(char* h, Event* e) {
  ENTER;
  if (!e->shared) return INVALID_HANDLE;
  memset(h, 0xEE, 64);
  memcpy(h, e->name, 40);
  return OK;
}
typedef struct {
  char bytes[64];
} Handle;
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

// What the simulated driver of the server's tests has not, because only clients ask for it: attributes of pointers, a
// stack of contexts, the legacy default stream.
#define cuPointerGetAttribute simulated_cuPointerGetAttribute
#define cuEventRecord simulated_cuEventRecord
#define cuStreamWaitEvent simulated_cuStreamWaitEvent
#define cuStreamSynchronize simulated_cuStreamSynchronize
#define cuStreamQuery simulated_cuStreamQuery
#define cuStreamIsCapturing simulated_cuStreamIsCapturing
#define cuMemcpyHtoDAsync_v2 simulated_cuMemcpyHtoDAsync
#define cuMemcpyDtoHAsync_v2 simulated_cuMemcpyDtoHAsync
#define cuStreamGetCaptureInfo_v2 simulated_cuStreamGetCaptureInfo
#define cuStreamGetId simulated_cuStreamGetId
#define cuMemAllocAsync simulated_cuMemAllocAsync
#include "libcuda.c"
#undef cuPointerGetAttribute
#undef cuEventRecord
#undef cuStreamWaitEvent
#undef cuStreamSynchronize
#undef cuStreamQuery
#undef cuStreamIsCapturing
#undef cuMemcpyHtoDAsync_v2
#undef cuMemcpyDtoHAsync_v2
#undef cuStreamGetCaptureInfo_v2
#undef cuStreamGetId
#undef cuMemAllocAsync

static Stream* real(Stream* s) {
  static Stream* legacy;
  if (s != (Stream*)1) return s;
  if (!legacy) cuStreamCreate(&legacy, 1);
  return legacy;
}
R cuEventRecord(Event* e, Stream* s) { return simulated_cuEventRecord(e, real(s)); }
R cuStreamWaitEvent(Stream* s, Event* e, unsigned f) { return simulated_cuStreamWaitEvent(real(s), e, f); }
R cuStreamSynchronize(Stream* s) { return simulated_cuStreamSynchronize(real(s)); }
R cuStreamQuery(Stream* s) { return simulated_cuStreamQuery(real(s)); }
R cuStreamIsCapturing(Stream* s, int* status) { return simulated_cuStreamIsCapturing(real(s), status); }
R cuMemcpyHtoDAsync_v2(Ptr d, const void* h, size_t n, Stream* s) { return simulated_cuMemcpyHtoDAsync(d, h, n, real(s)); }
R cuMemcpyDtoHAsync_v2(void* h, Ptr d, size_t n, Stream* s) { return simulated_cuMemcpyDtoHAsync(h, d, n, real(s)); }
R cuStreamGetCaptureInfo_v2(Stream* s, int* status, uint64_t* id, Graph** g, Op*** deps, size_t* n) {
  return simulated_cuStreamGetCaptureInfo(real(s), status, id, g, deps, n);
}
R cuStreamGetId(Stream* s, unsigned long long* id) { return simulated_cuStreamGetId(real(s), id); }
R cuMemAllocAsync(Ptr* out, size_t n, Stream* s) { return simulated_cuMemAllocAsync(out, n, real(s)); }

R cuDevicePrimaryCtxGetState(int d, unsigned* flags, int* active) {
  (void)d;
  *flags = 0, *active = 1;
  return OK;
}
static __thread void* before[16];
static __thread int depth;
R cuCtxPushCurrent_v2(void* c) {
  cuCtxGetCurrent(&before[depth++]);
  return cuCtxSetCurrent(c);
}
R cuCtxPopCurrent_v2(void** c) {
  cuCtxGetCurrent(c);
  cuCtxSetCurrent(before[--depth]);
  return OK;
}
R cuCtxSynchronize(void) {
  ENTER;
  for (Stream* s = streams; s; s = s->next)
    while (s->head && !sticky) nap(), pump();
  return sticky;
}
static Pool* the_pool;
static R attribute(uint64_t* out, int a, Ptr p) {
  Range* r = find(p);
  unsigned pid, serial_of = 0;
  if (!r) return INVALID_VALUE;
  sscanf(strchr(r->name + 1, '-') + 3, "%u-%u", &pid, &serial_of);
  switch (a) {
    case 2: return *out = 2, OK;
    case 7: return *out = serial_of, OK;
    case 9: return *(int*)out = r->device, OK;
    case 10: return *out = r->kind == LEGACY, OK;
    case 11: case 19: return *out = r->base, OK;
    case 12: case 18: return *out = r->size, OK;
    case 14: return *out = r->kind == MAPPED || r->pool == 1, OK;
    case 17: return *out = r->kind == POOLED ? (uint64_t)the_pool : 0, OK;
    case 20: return *out = serial_of, OK;
    default: return *out = 0, OK;
  }
}
R cuPointerGetAttribute(uint64_t* out, int a, Ptr p) {
  Guard guard __attribute__((cleanup(leave))) = enter();
  return attribute(out, a, p);
}
R cuPointerGetAttributes(unsigned n, int* a, void** out, Ptr p) {
  Guard guard __attribute__((cleanup(leave))) = enter();
  for (unsigned i = 0; i < n; i++) {
    uint64_t v = 0;
    attribute(&v, a[i], p);
    memcpy(out[i], &v, 8);
  }
  return OK;
}
R simPool(Pool* p) { return the_pool = p, OK; }
R cuMemRetainAllocationHandle(Alloc** a, Ptr p) {
  ENTER;
  Range* r = find(p);
  if (!r || r->kind != MAPPED) return INVALID_VALUE;
  *a = calloc(1, sizeof **a);
  (*a)->size = r->size, (*a)->device = r->device;
  sscanf(strchr(r->name + 1, '-') + 3, "%u-%u", &(*a)->pid, &(*a)->n);
  return OK;
}
// A stream that stands still until it is let go.
R simHold(Stream* s, Event** e) {
  ENTER;
  *e = calloc(1, sizeof **e);
  (*e)->state = calloc(1, sizeof(State));
  return put(s, (Op){.kind = WAIT, .event = *e, .target = 1});
}
R simRelease(Event* e) {
  ENTER;
  e->state->completed = 1;
  return OK;
}

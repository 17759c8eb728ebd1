// Memory: allocations, copies, what is known of addresses, handles for other processes.
#pragma once
enum { TO_DEVICE = 1, TO_HOST = 2, ON_DEVICE = 3, ANY_WAY = 4, LARGE = 65536, LEGACY_ANSWERED = 71260540 };

static R take(Ptr* out, size_t n, int kind, const char* what) {
  if (!out) return INVALID_VALUE;
  *out = 0;
  return !n ? OK : starved() ? OOM : make(out, n, kind, what);
}
R hipMalloc(Ptr* out, size_t n) {
  ENTER;
  return take(out, n, LEGACY, "m");
}
// What hipFree and hipFreeAsync take: allocations, and what is imported from pools.
static int is_own(const Range* r) {
  return r->kind == LEGACY || r->kind == POOLED || (r->kind == IMPORTED && r->pool);
}
R hipFree(Ptr p) {
  ENTER;
  Range* r = find(p);
  if (!p) return OK;
  if (!r || r->base != p || !is_own(r)) return INVALID_VALUE;
  return finish_all() ? sticky : drop(p);
}
R hipHostMalloc(void** p, size_t n, unsigned f) {
  ENTER;
  return (void)f, *p = malloc(n), *p ? OK : OOM;
}
R hipHostFree(void* p) {
  ENTER;
  return free(p), OK;
}
R hipMemGetInfo(size_t* left, size_t* total) {
  ENTER;
  return *left = MEMORY - used(), *total = MEMORY, OK;
}

static R fill(Ptr p, unsigned char v, size_t n, Stream* s) {
  if (!n) return OK;
  return in((void*)p, n) || locked_at(p, n) ? put_on(s, (Op){.kind = SET, .a = p, .value = v, .n = n}) : INVALID_VALUE;
}
R hipMemsetAsync(Ptr p, int v, size_t n, Stream* s) {
  ENTER;
  return fill(p, (unsigned char)v, n, s);
}
R hipMemsetD8Async(Ptr p, unsigned char v, size_t n, Stream* s) {
  ENTER;
  return fill(p, v, n, s);
}
R hipMemset(Ptr p, int v, size_t n) {
  ENTER;
  const R r = fill(p, (unsigned char)v, n, 0);
  return r ? r : finish(stream_of(0));
}
static R copy(Ptr to, Ptr from, size_t n, int kind, Stream* handle) {
  if (!n) return OK;
  if (kind < 0 || kind > ANY_WAY) return INVALID_VALUE;
  const int to_device = in((void*)to, n), from_device = in((void*)from, n);
  if ((kind == TO_DEVICE || kind == ON_DEVICE) && !to_device) return INVALID_VALUE;
  if ((kind == TO_HOST || kind == ON_DEVICE) && !from_device) return INVALID_VALUE;
  if ((!to_device && find(to)) || (!from_device && find(from))) return INVALID_VALUE;  // beyond the end
  if (from_device) return put_on(handle, (Op){.kind = COPY, .a = to, .b = from, .n = n});
  if (n > LARGE && stream_of(handle)->head) {
    fprintf(stderr, "sim: a large copy behind other work would wait for it\n");
    abort();
  }
  void* staged = memcpy(malloc(n), (void*)from, n);
  return put_on(handle, (Op){.kind = COPY, .a = to, .b = (Ptr)staged, .n = n, .params = staged});
}
R hipMemcpyAsync(Ptr to, Ptr from, size_t n, int kind, Stream* s) {
  ENTER;
  return copy(to, from, n, kind, s);
}
R hipMemcpyHtoDAsync(Ptr to, Ptr from, size_t n, Stream* s) {
  ENTER;
  return copy(to, from, n, TO_DEVICE, s);
}
R hipMemcpyHtoD(Ptr to, Ptr from, size_t n) {
  ENTER;
  R r = finish(stream_of(0));
  if (!r) r = copy(to, from, n, TO_DEVICE, 0);
  return r ? r : finish(stream_of(0));
}
R hipMemcpyDtoHAsync(Ptr to, Ptr from, size_t n, Stream* s) {
  ENTER;
  return copy(to, from, n, TO_HOST, s);
}
R hipMemcpyDtoDAsync(Ptr to, Ptr from, size_t n, Stream* s) {
  ENTER;
  return copy(to, from, n, ON_DEVICE, s);
}
R hipMemcpy(Ptr to, Ptr from, size_t n, int kind) {
  ENTER;
  R r = finish(stream_of(0));  // streams that do not block are not waited for
  if (!r) r = copy(to, from, n, kind, 0);
  return r ? r : finish(stream_of(0));
}

R hipMemGetAddressRange(Ptr* b, size_t* n, Ptr p) {
  ENTER;
  Range* r = find(p);
  if (!r) return NOT_FOUND;
  if (b) *b = r->base;
  if (n) *n = r->size;
  return OK;
}
R hipMemPtrGetInfo(Ptr p, size_t* n) { return hipMemGetAddressRange(0, n, p); }
static R pointer_attribute(uint64_t* out, int a, Ptr p) {
  Range* r = find(p);
  if (!r) return INVALID_VALUE;
  switch (a) {
    case 2:  // MEMORY_TYPE
      return *(unsigned*)out = 2, OK;
    case 3:  // DEVICE_POINTER
      return *out = p, OK;
    case 7:  // BUFFER_ID: 32 bits
      return *(unsigned*)out = r->id, OK;
    case 8:  // IS_MANAGED
      return *(char*)out = 0, OK;
    case 9:  // DEVICE_ORDINAL
      return *(int*)out = r->device, OK;
    case 10:  // IS_LEGACY_HIP_IPC_CAPABLE, which older runtimes do not answer
      return *(int*)out = r->kind != MAPPED, version() < LEGACY_ANSWERED ? NOT_SUPPORTED : OK;
    case 11:  // RANGE_START_ADDR
      return *out = r->base, OK;
    case 12:  // RANGE_SIZE: 32 bits, whatever the size
      return *(unsigned*)out = (unsigned)r->size, OK;
    case 13:  // MAPPED
      return *(char*)out = 1, OK;
  }
  return NOT_SUPPORTED;
}
R hipPointerGetAttribute(uint64_t* out, int a, Ptr p) {
  ENTER;
  return pointer_attribute(out, a, p);
}
R hipDrvPointerGetAttributes(unsigned n, const int* attributes, uint64_t** out, Ptr p) {
  ENTER;
  if (!n || !p) return INVALID_VALUE;
  for (unsigned i = 0; i < n; i++) pointer_attribute(out[i], attributes[i], p);  // what fails is left as it is
  return OK;
}
typedef struct {
  int type, device;
  void *at, *host;
  int managed;
  unsigned flags;
} PointerInfo;
R hipPointerGetAttributes(PointerInfo* info, Ptr p) {
  ENTER;
  Range* r = find(p);
  memset(info, 0, sizeof *info);  // of memory that is not the device's: type 0, unregistered
  info->device = r ? r->device : -2;
  if (r) info->type = 2, info->at = (void*)p;
  return OK;
}

// A handle opens where the pointer was that it was made of, not at the beginning of the allocation; opened once more,
// at the beginning.
typedef struct {
  char name[40];
  uint64_t offset, size, rest;
} MemoryHandle;
R hipIpcGetMemHandle(MemoryHandle* h, Ptr p) {
  ENTER;
  Range* r = find(p);
  if (!r || r->kind != LEGACY) return INVALID_VALUE;
  memset(h, 0xCC, sizeof *h);
  memcpy(h->name, r->name, 40);
  h->offset = p - r->base, h->size = r->size;
  return OK;
}
static R import(Ptr* out, const char* name) {
  size_t n;
  void* at = shared(name, &n, 0);
  if (!at) return INVALID_VALUE;
  *out = (Ptr)at;
  Range* r = add(*out, n, name, IMPORTED);
  if (quirk("current")) r->device = current - 1;
  return OK;
}
R hipIpcOpenMemHandle(Ptr* out, MemoryHandle h, unsigned f) {
  ENTER;
  char any[40], own[40];
  h.name[39] = 0;
  snprintf(any, sizeof any, "/tw%.8s-m-", tag());
  snprintf(own, sizeof own, "/tw%.8s-m-%u-", tag(), getpid());
  if (f != 1 || strncmp(h.name, any, strlen(any))) return INVALID_VALUE;
  if (!strncmp(h.name, own, strlen(own)) || quirk("equal_pids")) return INVALID_CONTEXT;
  for (Range* r = ranges; r; r = r->next)
    if (r->kind == IMPORTED && !strcmp(r->name, h.name)) return r->uses++, *out = r->base, OK;  // without the offset
  if (import(out, h.name)) return INVALID_DEVICE_POINTER;
  *out += h.offset;
  return OK;
}
R hipIpcCloseMemHandle(Ptr p) {
  ENTER;
  Range* r = find(p);
  if (!r || r->kind != IMPORTED) return INVALID_VALUE;
  if (finish_all()) return sticky;
  return r->uses-- ? OK : drop(r->base);
}

// Memory: pools, allocations, handles for other processes, virtual memory.
#pragma once
typedef struct {
  int alloc, handles;
  struct {
    int type, id;
  } location;
  void* w;
  size_t max;
  char rest[64];
} PoolProps;
typedef struct {
  int exportable, imported;
} Pool;
R cuMemPoolCreate(Pool** p, const PoolProps* x) {
  ENTER;
  if (x->alloc != 1 || x->location.type != 1 || x->location.id != current - 1) return INVALID_VALUE;
  *p = calloc(1, sizeof **p);
  (*p)->exportable = x->handles;
  return OK;
}
R cuMemPoolDestroy(Pool* p) {
  ENTER;
  (void)p;
  return OK;
}
R cuMemPoolSetAttribute(Pool* p, int a, uint64_t* v) {
  ENTER;
  return p && a == 4 && *v ? OK : INVALID_VALUE;
}
R cuMemPoolGetAttribute(Pool* p, int a, uint64_t* v) {
  ENTER;
  (void)p, (void)a;
  *v = used();
  return OK;
}
R cuMemPoolTrimTo(Pool* p, size_t n) {
  ENTER;
  (void)p, (void)n;
  return OK;
}
R cuMemPoolGetAccess(int* f, Pool* p, void* l) {
  ENTER;
  (void)l;
  *f = p->imported ? 0 : 3;
  return OK;
}
R cuMemPoolSetAccess(Pool* p, void* d, size_t n) {
  ENTER;
  if (n != 1 || ((int*)d)[0] != 1 || ((int*)d)[2] != 3) return INVALID_VALUE;
  p->imported = 2;
  return OK;
}
R cuMemAllocFromPoolAsync(Ptr* out, size_t n, Pool* p, Stream* s) {
  ENTER;
  if (!p || !s) return INVALID_VALUE;
  R r = make(out, n, POOLED, "p");
  if (!r) find(*out)->pool = p->exportable;
  return r;
}
// From the default pool, which is not shared.
R cuMemAllocAsync(Ptr* out, size_t n, Stream* s) {
  ENTER;
  return s && s->capture ? CAPTURE_UNSUPPORTED : make(out, n, POOLED, "p");
}
R cuMemFreeAsync(Ptr p, Stream* s) {
  ENTER;
  if (!find(p)) return INVALID_VALUE;
  return put(s, (Op){.kind = FREE, .a = p});
}
R cuMemPoolExportToShareableHandle(int* fd, Pool* p, int type, unsigned long long f) {
  ENTER;
  if (!p->exportable || type != 1 || f) return INVALID_VALUE;
  *fd = eventfd(1, EFD_CLOEXEC);
  return OK;
}
R cuMemPoolImportFromShareableHandle(Pool** p, void* fd, int type, unsigned long long f) {
  ENTER;
  if (type != 1 || f || fcntl((int)(intptr_t)fd, F_GETFD) < 0) return INVALID_VALUE;
  *p = calloc(1, sizeof **p);
  (*p)->imported = 1;
  return OK;
}
R cuMemPoolExportPointer(char* data, Ptr p) {
  ENTER;
  Range* r = find(p);
  if (!r || !r->pool) return INVALID_VALUE;
  memset(data, 0xDD, 64);
  memcpy(data, r->name, 40);
  return OK;
}
static R import(Ptr* out, const char* name) {
  size_t n;
  void* at = shared(name, &n, 0);
  if (!at) return INVALID_VALUE;
  *out = (Ptr)at;
  add(*out, n, name, IMPORTED);
  return OK;
}
R cuMemPoolImportPointer(Ptr* out, Pool* p, const char* data) {
  ENTER;
  char name[40];
  memcpy(name, data, 40);
  name[39] = 0;
  return p->imported != 2 ? INVALID_VALUE : import(out, name);
}
R cuMemAlloc_v2(Ptr* out, size_t n) {
  ENTER;
  return make(out, n, LEGACY, "m");
}
R cuMemFree_v2(Ptr p) {
  ENTER;
  return drop(p);
}
R cuMemsetD8Async(Ptr p, unsigned char v, size_t n, Stream* s) {
  ENTER;
  if (!in((void*)p, n)) return INVALID_VALUE;
  return put(s, (Op){.kind = SET, .a = p, .value = v, .n = n});
}
R cuMemcpyHtoDAsync_v2(Ptr d, const void* h, size_t n, Stream* s) {
  ENTER;
  if (!in((void*)d, n)) return INVALID_VALUE;
  if (n > 65536 && s->head) {
    fprintf(stderr, "sim: a large copy behind other work would wait for it\n");
    abort();
  }
  void* staged = malloc(n);
  memcpy(staged, h, n);
  return put(s, (Op){.kind = COPY, .a = d, .b = (Ptr)staged, .n = n, .params = staged});
}
R cuMemcpyHtoD_v2(Ptr d, const void* h, size_t n) {
  ENTER;
  if (!in((void*)d, n)) return INVALID_VALUE;
  memcpy((void*)d, h, n);
  return OK;
}
R cuMemcpyDtoHAsync_v2(void* h, Ptr d, size_t n, Stream* s) {
  ENTER;
  if (!in((void*)d, n)) return INVALID_VALUE;
  return put(s, (Op){.kind = COPY, .a = (Ptr)h, .b = d, .n = n});
}
R cuMemHostRegister_v2(void* p, size_t n, unsigned f) {
  ENTER;
  return p && n && !f ? OK : INVALID_VALUE;
}
R cuMemHostUnregister(void* p) {
  ENTER;
  return p ? OK : INVALID_VALUE;
}
R cuMemGetAddressRange_v2(Ptr* b, size_t* n, Ptr p) {
  ENTER;
  Range* r = find(p);
  if (!r) return NOT_FOUND;
  *b = r->base, *n = r->size;
  return OK;
}
R cuPointerGetAttribute(void* out, int a, Ptr p) {
  ENTER;
  if (!find(p) || a != 9) return INVALID_VALUE;
  *(int*)out = find(p)->device;
  return OK;
}
R cuIpcGetMemHandle(char* h, Ptr p) {
  ENTER;
  Range* r = find(p);
  if (!r || r->kind != LEGACY) return INVALID_VALUE;
  memset(h, 0xCC, 64);
  memcpy(h, r->name, 40);
  return OK;
}
R cuIpcOpenMemHandle_v2(Ptr* out, Handle h, unsigned f) {
  ENTER;
  char any[40], own[40];
  h.bytes[39] = 0;
  snprintf(any, sizeof any, "/tw%.8s-m-", tag());
  snprintf(own, sizeof own, "/tw%.8s-m-%u-", tag(), getpid());
  if (f != 1 || strncmp(h.bytes, any, strlen(any))) return INVALID_VALUE;
  return strncmp(h.bytes, own, strlen(own)) ? import(out, h.bytes) : INVALID_CONTEXT;
}
R cuIpcCloseMemHandle(Ptr p) {
  ENTER;
  Range* r = find(p);
  return r && r->kind == IMPORTED ? drop(p) : INVALID_VALUE;
}

// Virtual memory: a descriptor carries the numbers of a name.
typedef struct {
  unsigned pid, n;
  size_t size;
  int device;
} Alloc;
static void name_of(char* out, const Alloc* a) {
  snprintf(out, 40, "/tw%.8s-v-%u-%u-%d", tag(), a->pid, a->n, a->device);
}
typedef struct {
  int type, handles;
  struct {
    int type, id;
  } location;
  char rest[64];
} Prop;
R cuMemGetAllocationGranularity(size_t* g, const Prop* p, int o) {
  ENTER;
  if (p->location.type != 1 || o) return INVALID_VALUE;
  *g = 2 << 20;
  return OK;
}
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
R cuMemRelease(Alloc* a) {
  ENTER;
  free(a);
  return OK;
}
R cuMemExportToShareableHandle(int* fd, Alloc* a, int type, unsigned long long f) {
  ENTER;
  if (type != 1 || f) return INVALID_VALUE;
  uint64_t v = (uint64_t)a->pid << 32 | a->n << 4 | a->device;
  *fd = eventfd(0, EFD_CLOEXEC);
  return write(*fd, &v, 8) == 8 ? OK : INVALID_VALUE;
}
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
R cuMemGetAllocationPropertiesFromHandle(Prop* p, Alloc* a) {
  ENTER;
  memset(p, 0, 32);
  p->type = p->handles = p->location.type = 1, p->location.id = a->device;
  return OK;
}
R cuMemAddressReserve(Ptr* out, size_t n, size_t align, Ptr at, unsigned long long f) {
  ENTER;
  if (align || at || f) return INVALID_VALUE;
  void* p = mmap(0, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *out = (Ptr)p;
  return p == MAP_FAILED ? OOM : OK;
}
R cuMemAddressFree(Ptr p, size_t n) {
  ENTER;
  return munmap((void*)p, n) ? INVALID_VALUE : OK;
}
R cuMemMap(Ptr p, size_t n, size_t offset, Alloc* a, unsigned long long f) {
  ENTER;
  char name[40];
  if (offset || f || n % (2 << 20)) return INVALID_VALUE;
  if (n > a->size) return NOT_SUPPORTED;  // as 580.159 does
  name_of(name, a);
  int fd = shm_open(name, O_RDWR, 0600);
  if (fd < 0) return INVALID_VALUE;
  void* at = mmap((void*)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return INVALID_VALUE;
  add(p, n, name, MAPPED);
  return OK;
}
R cuMemSetAccess(Ptr p, size_t n, const int* d, size_t count) {
  ENTER;
  if (count != 1 || d[0] != 1 || d[1] != current - 1 || d[2] != 3) return INVALID_VALUE;
  return mprotect((void*)p, n, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}
R cuMemUnmap(Ptr p, size_t n) {
  ENTER;
  Range* r = find(p);
  if (!r || r->size != n || r->kind != MAPPED) return INVALID_VALUE;
  drop(p);
  return mmap((void*)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED;
}

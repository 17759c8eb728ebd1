// Stream-ordered memory.
#pragma once
typedef struct {
  int alloc, handles;
  struct {
    int type, id;
  } location;
  void* w;
  size_t max;
  char rest[56];
} PoolProps;
typedef struct {
  int exportable, imported;
} Pool;
static Pool default_pool;
R hipDeviceGetDefaultMemPool(Pool** p, int d) { return is_device(d) ? (*p = &default_pool, OK) : INVALID_DEVICE; }
R hipDeviceGetMemPool(Pool** p, int d) { return hipDeviceGetDefaultMemPool(p, d); }
R hipMemPoolCreate(Pool** p, const PoolProps* x) {
  ENTER;
  if (x->alloc != 1 || x->location.type != 1 || !is_device(x->location.id) || x->handles & ~1) return INVALID_VALUE;
  *p = calloc(1, sizeof **p);
  (*p)->exportable = x->handles;
  return OK;
}
R hipMemPoolDestroy(Pool* p) {
  ENTER;
  return !p || p == &default_pool ? INVALID_VALUE : OK;
}
R hipMemPoolSetAttribute(Pool* p, int a, const uint64_t* v) {
  ENTER;
  return !p || !v || a < 1 || a > 8 ? INVALID_VALUE : OK;
}
R hipMemPoolGetAttribute(Pool* p, int a, uint64_t* v) {
  ENTER;
  if (!p || a < 1 || a > 8) return INVALID_VALUE;
  return a < 4 ? (*(int*)v = 1, OK) : (*v = a == 4 ? 0 : used(), OK);
}
R hipMemPoolTrimTo(Pool* p, size_t n) {
  ENTER;
  return (void)n, p ? OK : INVALID_VALUE;
}
R hipMemPoolGetAccess(int* f, Pool* p, const int* location) {
  ENTER;
  return (void)location, *f = p->imported == 1 ? 0 : 3, OK;
}
R hipMemPoolSetAccess(Pool* p, const int* d, size_t n) {
  ENTER;
  if (n != 1 || d[0] != 1 || d[2] != 3) return INVALID_VALUE;
  if (p->imported) p->imported = 2;
  return OK;
}
R hipMallocFromPoolAsync(Ptr* out, size_t n, Pool* p, Stream* s) {
  ENTER;
  if (!p) return INVALID_VALUE;
  if (stream_of(s)->capture) return CAPTURE_UNSUPPORTED;
  const R r = take(out, n, POOLED, "p");
  if (!r && n) find(*out)->pool = p->exportable;
  return r;
}
R hipMallocAsync(Ptr* out, size_t n, Stream* s) { return hipMallocFromPoolAsync(out, n, &default_pool, s); }
R hipFreeAsync(Ptr p, Stream* s) {
  ENTER;
  Range* r = find(p);
  if (!p) return OK;
  if (!r || r->base != p || !is_own(r)) return INVALID_VALUE;
  return put_on(s, (Op){.kind = FREE, .a = p});
}
R hipMemPoolExportToShareableHandle(int* fd, Pool* p, int type, unsigned f) {
  ENTER;
  if (!p->exportable || type != 1 || f) return INVALID_VALUE;
  return *fd = eventfd(1, EFD_CLOEXEC), OK;
}
R hipMemPoolImportFromShareableHandle(Pool** p, void* fd, int type, unsigned f) {
  ENTER;
  if (type != 1 || f || fcntl((int)(intptr_t)fd, F_GETFD) < 0) return INVALID_VALUE;
  *p = calloc(1, sizeof **p);
  (*p)->imported = 1;
  return OK;
}
R hipMemPoolExportPointer(char* data, Ptr p) {
  ENTER;
  Range* r = find(p);
  if (!r || !r->pool) return INVALID_VALUE;
  memset(data, 0xDD, 64);
  memcpy(data, r->name, 40);
  return OK;
}
R hipMemPoolImportPointer(Ptr* out, Pool* p, const char* data) {
  ENTER;
  char name[40];
  memcpy(name, data, 40);
  name[39] = 0;
  if (p->imported != 2 || (quirk("pool_first") && device_of(name)) || import(out, name)) return INVALID_VALUE;
  return find(*out)->pool = 1, OK;
}

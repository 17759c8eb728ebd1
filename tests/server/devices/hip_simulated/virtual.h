// Virtual memory: a descriptor carries the numbers of a name, and is no regular file, as the driver's are none.
#pragma once
enum { GRANULE = 2 << 20, BY_VALUE = 70100000 };
typedef struct {
  char name[40];
  size_t size;
  int fd, device, handles, uses;
} Alloc;
typedef struct {
  int type, handles;
  struct {
    int type, id;
  } location;
  void* w;
  char flags[8];
} Prop;
R hipMemGetAllocationGranularity(size_t* g, const Prop* p, int o) {
  ENTER;
  if (p->location.type != 1 || p->type != 1 || o < 0 || o > 1) return INVALID_VALUE;
  return *g = GRANULE, OK;
}
static Alloc* allocation(const char* name, int fd, size_t size, int handles) {
  Alloc* a = calloc(1, sizeof *a);
  snprintf(a->name, sizeof a->name, "%s", name);
  a->fd = fd, a->size = size, a->device = device_of(name), a->handles = handles, a->uses = 1;
  return a;
}
R hipMemCreate(Alloc** a, size_t n, const Prop* p, unsigned long long f) {
  ENTER;
  if (!n || n % GRANULE || f) return INVALID_VALUE;
  if (p->type != 1 || p->location.type != 1 || !is_device(p->location.id)) return INVALID_VALUE;
  if (starved() || used() + n > MEMORY) return OOM;
  char name[40];
  const int was = current;
  current = p->location.id + 1;
  named(name, "v", getpid(), ++serial);
  current = was;
  const int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, (off_t)n)) return OOM;
  return *a = allocation(name, fd, n, p->handles), OK;
}
// The name stays: descriptors and emulators of other processes find the memory by it. (TW_SIM_TAG tells what is left
// over, for whoever removes it.)
R hipMemRelease(Alloc* a) {
  ENTER;
  if (!a || a->uses < 1) return INVALID_VALUE;
  if (--a->uses == 0) {
    close(a->fd);
    free(a);
  }
  return OK;
}
R hipMemExportToShareableHandle(int* fd, Alloc* a, int type, unsigned long long f) {
  ENTER;
  unsigned pid, n;
  if (type != 1 || f || !(a->handles & 1)) return INVALID_VALUE;
  sscanf(strstr(a->name, "-v-"), "-v-%u-%u", &pid, &n);
  const uint64_t v = (uint64_t)pid << 32 | n << 4 | (unsigned)in_machine(a->device);
  *fd = eventfd(0, EFD_CLOEXEC);
  return write(*fd, &v, 8) == 8 ? OK : INVALID_VALUE;
}
R hipMemImportFromShareableHandle(Alloc** a, void* handle, int type) {
  ENTER;
  // Runtimes before 7.1 take the address of the descriptor.
  const int given = version() >= BY_VALUE ? (int)(intptr_t)handle : *(int*)handle;
  char name[40];
  uint64_t v;
  struct stat s;
  if (type != 1 || fstat(given, &s) || S_ISREG(s.st_mode)) return INVALID_VALUE;
  if (read(given, &v, 8) != 8 || write(given, &v, 8) != 8) return INVALID_VALUE;
  snprintf(name, sizeof name, "/tw%.8s-v-%u-%u-%u", tag(), (unsigned)(v >> 32), (unsigned)v >> 4, (unsigned)v & 15);
  const int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0 || fstat(fd, &s)) return INVALID_VALUE;
  return *a = allocation(name, fd, (size_t)s.st_size, 1), OK;
}
R hipMemGetAllocationPropertiesFromHandle(Prop* p, Alloc* a) {
  ENTER;
  memset(p, 0, sizeof *p);
  p->type = p->location.type = 1, p->handles = a->handles, p->location.id = a->device;
  return OK;
}
R hipMemAddressReserve(Ptr* out, size_t n, size_t align, Ptr at, unsigned long long f) {
  ENTER;
  if (!n || align & (align - 1) || at || f) return INVALID_VALUE;
  void* p = mmap(0, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *out = (Ptr)p;
  return p == MAP_FAILED ? OOM : OK;
}
R hipMemAddressFree(Ptr p, size_t n) {
  ENTER;
  return munmap((void*)p, n) ? INVALID_VALUE : OK;
}
R hipMemMap(Ptr p, size_t n, size_t offset, Alloc* a, unsigned long long f) {
  ENTER;
  if (offset || f || n % GRANULE) return INVALID_VALUE;
  if (n > a->size) return NOT_SUPPORTED;
  if (mmap((void*)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, a->fd, 0) == MAP_FAILED) return INVALID_VALUE;
  Range* r = add(p, n, a->name, MAPPED);
  r->source = a, a->uses++;
  return OK;
}
R hipMemUnmap(Ptr p, size_t n) {
  ENTER;
  Range* r = find(p);
  if (!r || r->size != n || r->kind != MAPPED) return INVALID_VALUE;
  if (finish_all()) return sticky;
  Alloc* a = r->source;
  drop(p);
  if (mmap((void*)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) return INVALID_VALUE;
  return hipMemRelease(a);
}
R hipMemSetAccess(Ptr p, size_t n, const int* d, size_t count) {
  ENTER;
  if (count != 1 || d[0] != 1 || !is_device(d[1]) || (d[2] != 3 && d[2] != 1) || !in((void*)p, n)) return INVALID_VALUE;
  return mprotect((void*)p, n, PROT_READ | (d[2] == 3 ? PROT_WRITE : 0)) ? INVALID_VALUE : OK;
}
R hipMemRetainAllocationHandle(Alloc** a, Ptr p) {
  ENTER;
  Range* r = find(p);
  if (!r || r->kind != MAPPED) return INVALID_VALUE;
  return *a = r->source, (*a)->uses++, OK;
}

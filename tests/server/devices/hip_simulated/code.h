// Code objects, and what the runtime reads of a kernel: its descriptor and its metadata.
#pragma once
enum { EM_AMDGPU = 224, MACHINE_MASK = 0xff };
typedef struct {
  char* image;
  size_t size;
  uint64_t id;
  int device, sent;
} Module;
struct Func {
  Module* module;
  char name[1024];
  unsigned lds, scratch, arguments, threads, registers;
};

static uint64_t at8(const char* p) {
  uint64_t v;
  return memcpy(&v, p, 8), v;
}
static uint32_t at4(const char* p) {
  uint32_t v;
  return memcpy(&v, p, 4), v;
}
static uint16_t at2(const char* p) {
  uint16_t v;
  return memcpy(&v, p, 2), v;
}
// The section of a type (SHT_DYNSYM, SHT_NOTE), and the head of it.
static const char* section(const Module* m, uint32_t type, const char** head) {
  const uint64_t heads = at8(m->image + 40);
  for (unsigned i = 0; i < at2(m->image + 60); i++) {
    const char* h = m->image + heads + i * at2(m->image + 58);
    if (at4(h + 4) == type && at8(h + 24) + at8(h + 32) <= m->size) return *head = h, m->image + at8(h + 24);
  }
  return 0;
}
// What lies at a virtual address.
static const char* at_address(const Module* m, uint64_t address) {
  const uint64_t heads = at8(m->image + 32);
  for (unsigned i = 0; i < at2(m->image + 56); i++) {
    const char* h = m->image + heads + i * at2(m->image + 54);
    if (at4(h) == 1 && address >= at8(h + 16) && address < at8(h + 16) + at8(h + 32))  // PT_LOAD
      return m->image + at8(h + 8) + (address - at8(h + 16));
  }
  return 0;
}
// A kernel's descriptor: 64 bytes, under its name with ".kd".
static const char* descriptor(const Module* m, const char* kernel) {
  const char *head, *symbols = section(m, 11, &head);
  char wanted[1030];
  snprintf(wanted, sizeof wanted, "%s.kd", kernel);
  if (!symbols) return 0;
  const char* names = m->image + at8(m->image + at8(m->image + 40) + at4(head + 40) * at2(m->image + 58) + 24);
  for (uint64_t n = at8(head + 32) / 24, i = 0; i < n; i++)
    if (!strcmp(names + at4(symbols + 24 * i), wanted)) return at_address(m, at8(symbols + 24 * i + 8));
  return 0;
}
// A number of the kernel's metadata, which is MessagePack with the keys of each kernel in alphabetical order: ``key``
// is the last one before the kernel's ".symbol", or the first one behind it.
static unsigned metadata(const Module* m, const char* kernel, const char* key, unsigned otherwise) {
  const char *head, *notes = section(m, 7, &head);
  char wanted[1030];
  const size_t n = notes ? at8(head + 32) : 0, length = strlen(key);
  const int wanted_length = snprintf(wanted, sizeof wanted, "%s.kd", kernel);
  const char *found = 0, *end = notes;
  for (; notes && end && (end = memmem(end, n - (end - notes), wanted, wanted_length)); end++)
    if (end > notes + 8 && memmem(end - 11, 11, ".symbol", 7)) break;
  if (!end) return otherwise;
  if (strcmp(key, ".symbol") > 0) found = memmem(end, notes + n - end, key, length);
  else
    for (const char* at = notes; (at = memmem(at, end - at, key, length)); at += length) found = at;
  if (!found) return otherwise;
  const unsigned char* v = (const unsigned char*)found + length;
  return v[0] < 0x80 ? v[0] : v[0] == 0xcc ? v[1] : v[0] == 0xcd ? v[1] * 256u + v[2] : otherwise;
}

R hipModuleLoadData(Module** out, const char* image) {
  ENTER;
  static uint64_t modules;
  if (!image || memcmp(image, "\177ELF\2\1", 6) || number("TW_SIM_FAULT_IMAGE", 0)) return INVALID_IMAGE;
  if (at2(image + 18) != EM_AMDGPU) return INVALID_IMAGE;
  if ((at4(image + 48) & MACHINE_MASK) != chip(current - 1)->machine) return NO_BINARY;
  Module* m = *out = calloc(1, sizeof *m);
  m->size = at8(image + 40) + (uint64_t)at2(image + 58) * at2(image + 60);
  m->image = memcpy(malloc(m->size), image, m->size);
  m->id = ++modules, m->device = current - 1;
  return OK;
}
R hipModuleLoadDataEx(Module** m, const char* image, unsigned n, void* options, void* values) {
  return (void)n, (void)options, (void)values, hipModuleLoadData(m, image);
}
R hipModuleUnload(Module* m) {
  ENTER;
  for (Stream* s = streams; s; s = s->next)
    for (Op* o = s->head; o; o = o->next)
      if (o->kind == LAUNCH && o->func->module == m) {
        fprintf(stderr, "sim: a module was unloaded under way\n");
        abort();
      }
  if (m->sent) submit_end(m->id);
  free(m->image);
  free(m);
  return OK;
}
R hipModuleGetFunction(Func** out, Module* m, const char* name) {
  ENTER;
  const char* d = strlen(name) < 1020 ? descriptor(m, name) : 0;
  if (!d) return NOT_FOUND;
  Func* f = *out = calloc(1, sizeof *f);
  f->module = m, f->lds = at4(d), f->scratch = at4(d + 4), f->arguments = at4(d + 8);
  f->threads = metadata(m, name, ".max_flat_workgroup_size", 1024);
  f->registers = metadata(m, name, ".vgpr_count", 0);
  snprintf(f->name, sizeof f->name, "%s", name);
  return OK;
}
R hipFuncGetAttribute(int* v, int a, const Func* f) {
  ENTER;
  if (!f || !v) return INVALID_VALUE;
  switch (a) {
    case 0:  // MAX_THREADS_PER_BLOCK
      return *v = (int)f->threads, OK;
    case 1:  // SHARED_SIZE_BYTES
      return *v = (int)f->lds, OK;
    case 2:  // CONST_SIZE_BYTES
      return *v = 0, OK;
    case 3:  // LOCAL_SIZE_BYTES
      return *v = (int)f->scratch, OK;
    case 4:  // NUM_REGS
      return *v = (int)f->registers, OK;
    case 6:  // BINARY_VERSION
      return *v = 0, OK;
    case 8:  // MAX_DYNAMIC_SHARED_SIZE_BYTES
      return *v = (int)(chip(f->module->device)->lds - f->lds), OK;
  }
  return INVALID_VALUE;
}
R hipFuncSetAttribute(const Func* f, int a, int v) {
  ENTER;
  if (!f || (a != 8 && a != 9)) return INVALID_VALUE;
  return a == 8 && (v < 0 || f->lds + (unsigned)v > chip(f->module->device)->lds) ? INVALID_VALUE : OK;
}
R hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const Func* f, int threads, size_t shared) {
  ENTER;
  if (!f || threads < 1) return INVALID_VALUE;
  const unsigned lds = f->lds + (unsigned)shared;
  *n = lds ? (int)(chip(f->module->device)->lds / lds) : 2048 / threads;
  return OK;
}

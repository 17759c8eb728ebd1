// Modules, functions, launches, tensor maps and graphs.
#pragma once
// A binary's section by name, and the size of a kernel's parameter as the compiler noted it (EIATTR_KPARAM_INFO).
static const char* section(const char* image, const char* name, size_t* size) {
  const char* heads = image + *(uint64_t*)(image + 40);
  const unsigned each = *(uint16_t*)(image + 58), count = *(uint16_t*)(image + 60), strings = *(uint16_t*)(image + 62);
  const char* names = image + *(uint64_t*)(heads + strings * each + 24);
  for (unsigned i = 0; i < count; i++) {
    const char* head = heads + i * each;
    if (!strcmp(names + *(uint32_t*)head, name)) {
      *size = *(uint64_t*)(head + 32);
      return image + *(uint64_t*)(head + 24);
    }
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
static int k_nothing(const void* p, const Shape* s) {
  (void)p, (void)s;
  return 0;
}

typedef struct {
  char* image;
  size_t size;
  unsigned long long context;
} Module;
R cuModuleLoadData(Module** m, const char* image) {
  ENTER;
  if (memcmp(image, "\177ELF", 4) || image[18] != (char)190) return INVALID_IMAGE;  // EM_CUDA
  uint64_t sections = *(uint64_t*)(image + 40),
           size = sections + (uint64_t)*(uint16_t*)(image + 58) * *(uint16_t*)(image + 60);
  *m = calloc(1, sizeof **m);
  (*m)->image = memcpy(malloc(size), image, size), (*m)->size = size, (*m)->context = context_now();
  return OK;
}
R cuModuleUnload(Module* m) {
  ENTER;
  for (Stream* s = streams; s; s = s->next)
    for (Op* o = s->head; o; o = o->next)
      if (o->kind == LAUNCH && o->func->module == m) {
        fprintf(stderr, "sim: a module was unloaded under way\n");
        abort();
      }
  free(m->image);
  free(m);
  return OK;
}
R cuModuleGetFunction(Func** f, Module* m, const char* name) {
  ENTER;
  char text[512];
  size_t size;
  snprintf(text, sizeof text, ".text.%s", name);
  if (!section(m->image, text, &size)) return NOT_FOUND;
  Kernel* k = calloc(1, sizeof *k);
  *k = (Kernel){"", param_bytes(m->image, name), k_nothing};
  for (unsigned i = 0; i < sizeof kernels / sizeof *kernels; i++)
    if (!strcmp(kernels[i].name, name)) {
      if (kernels[i].params != k->params) {
        fprintf(stderr, "sim: parameters of %s\n", name);
        abort();
      }
      *k = kernels[i];
    }
  *f = calloc(1, sizeof **f);
  (*f)->kernel = k, (*f)->shared_max = 49152, (*f)->module = m;
  snprintf((*f)->name, sizeof(*f)->name, "%s", name);
  return OK;
}
R cuFuncGetParamInfo(Func* f, size_t i, size_t* offset, size_t* size) {
  ENTER;
  if (i) return INVALID_VALUE;
  *offset = f->kernel->params % 64 ? 0 : 48, *size = f->kernel->params;
  return OK;
}
R cuFuncLoad(Func* f) {
  ENTER;
  return f ? OK : INVALID_VALUE;
}
R cuFuncSetAttribute(Func* f, int a, int v) {
  ENTER;
  if (a == 8) {
    if (v > SHARED_MAX) return INVALID_VALUE;
    f->shared_max = v;
  } else if (a != 14) return INVALID_VALUE;
  return OK;
}

typedef struct {
  int id, pad;
  union {
    unsigned dim[3];
    int flag;
    char bytes[64];
  } value;
} Attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  Stream* stream;
  Attribute* attrs;
  unsigned count;
} Config;
R cuLaunchKernelEx(const Config* c, Func* f, void** params, void** extra) {
  ENTER;
  const unsigned long long home = f ? ((Module*)f->module)->context : 0;
  if (home > 0x2000 && context_gone[home - 0x2000]) {  // the driver reads what is no longer there
    fprintf(stderr, "sim: a function of a context that is gone was launched\n");
    abort();
  }
  if (f && (home != context_now() || (c->stream && c->stream->context != home))) return INVALID_HANDLE;
  Shape s = {.shared = c->shared, .cluster = 1};
  memcpy(s.grid, c->grid, 12), memcpy(s.block, c->block, 12);
  for (unsigned i = 0; i < c->count; i++) {
    if (c->attrs[i].id == 4) {
      unsigned* d = c->attrs[i].value.dim;
      if (!d[0] || !d[1] || !d[2] || s.grid[0] % d[0]) return INVALID_CLUSTER;
      s.cluster = d[0] * d[1] * d[2];
    } else if (c->attrs[i].id == 6) s.dependent = c->attrs[i].value.flag;
    else return INVALID_VALUE;
  }
  if (extra || !f || !s.grid[0] || !s.grid[1] || !s.grid[2] || !s.block[0] ||
      s.block[0] * s.block[1] * s.block[2] > 1024 || s.shared > f->shared_max)
    return INVALID_VALUE;
  void* copy = malloc(f->kernel->params);
  memcpy(copy, params[0], f->kernel->params);
  return put(c->stream, (Op){.kind = LAUNCH, .func = f, .shape = s, .params = copy});
}
R cuLaunchKernel(Func* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                 Stream* s, void** params, void** extra) {
  Config c = {{gx, gy, gz}, {bx, by, bz}, shared, s, 0, 0};
  return cuLaunchKernelEx(&c, f, params, extra);
}
R cuTensorMapEncodeTiled(Map* m, int type, unsigned rank, void* p, const uint64_t* dims, const uint64_t* strides,
                         const unsigned* box, const unsigned* elements, int inter, int swizzle, int l2, int fill) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  (void)l2;
  if (!rank || rank > 5 || (Ptr)p % 16 || inter || fill || type < 0 || type > 9 || swizzle > 3) return INVALID_VALUE;
  for (unsigned i = 0; i < rank; i++)
    if (!dims[i] || !box[i] || box[i] > 256 || elements[i] != 1 || (i && strides[i - 1] % 16)) return INVALID_VALUE;
  if (box[0] * bytes[type] % 16 || (swizzle && box[0] * bytes[type] > 16u << swizzle)) return INVALID_VALUE;
  memset(m, 0, 128);
  m->magic = 0x7473, m->address = (uint64_t)p, m->rank = rank;
  memcpy(m->sizes, dims, rank * 8);
  return OK;
}

R cuTensorMapEncodeIm2col(Map* m, int type, unsigned rank, void* p, const uint64_t* dims, const uint64_t* strides,
                          const int* lower, const int* upper, unsigned channels, unsigned pixels,
                          const unsigned* elements, int inter, int swizzle, int l2, int fill) {
  static const int limits[] = {32768, 128, 16};
  unsigned box[5] = {channels, 1, 1, 1, 1}, one[5] = {1, 1, 1, 1, 1};
  if (rank < 3 || rank > 5 || !pixels || pixels > 1024 || elements[rank - 1] != 1) return INVALID_VALUE;
  for (unsigned i = 0; i < rank - 2; i++) {
    int limit = limits[rank - 3];
    if (lower[i] < -limit || lower[i] >= limit || upper[i] < -limit || upper[i] >= limit) return INVALID_VALUE;
    if (elements[i + 1] < 1 || elements[i + 1] > 8) return INVALID_VALUE;
  }
  return cuTensorMapEncodeTiled(m, type, rank, p, dims, strides, box, one, inter, swizzle, l2, fill);
}

typedef struct {
  Func* func;
  unsigned grid[3], block[3], shared;
  void **params, **extra;
  void *kern, *ctx;
} NodeParams;
R cuGraphInstantiateWithFlags(Exec** e, Graph* g, unsigned long long f) {
  ENTER;
  if (f || !g->count) return INVALID_VALUE;
  *e = calloc(1, sizeof **e);
  (*e)->count = g->count;
  share_owned(&(*e)->owned, &g->owned);
  for (int i = 0; i < g->count; i++) {
    (*e)->origin[i] = g->nodes[i];
    (*e)->copy[i] = *g->nodes[i];
    if (g->nodes[i]->kind != LAUNCH) continue;
    size_t n = g->nodes[i]->func->kernel->params;
    (*e)->copy[i].params = memcpy(malloc(n), g->nodes[i]->params, n);
  }
  return OK;
}
R cuGraphExecKernelNodeSetParams_v2(Exec* e, Op* node, const NodeParams* p) {
  ENTER;
  for (int i = 0; i < e->count; i++)
    if (e->origin[i] == node) {
      if (p->func != node->func || p->extra || p->shared != node->shape.shared ||
          memcmp(p->grid, node->shape.grid, 12) || memcmp(p->block, node->shape.block, 12))
        return INVALID_VALUE;
      memcpy(e->copy[i].params, p->params[0], p->func->kernel->params);
      return OK;
    }
  return INVALID_VALUE;
}
R cuGraphLaunch(Exec* e, Stream* s) {
  ENTER;
  for (int i = 0; i < e->count; i++) {
    Op op = e->copy[i];
    const size_t n = op.kind == LAUNCH ? op.func->kernel->params : 0;
    op.params = n ? memcpy(malloc(n), e->copy[i].params, n) : 0;
    R r = put(s, op);
    if (r) return r;
  }
  return OK;
}
R cuGraphExecDestroy(Exec* e) {
  ENTER;
  drop_owned(&e->owned);
  free(e);
  return OK;
}
R cuGraphDestroy(Graph* g) {
  ENTER;
  drop_owned(&g->owned);
  free(g);
  return OK;
}
R cuUserObjectCreate(Owned** out, void* object, void (*destroy)(void*), unsigned references, unsigned flags) {
  ENTER;
  return own_object(out, object, destroy, references, flags);
}
R cuGraphRetainUserObject(Graph* g, Owned* item, unsigned references, unsigned flags) {
  ENTER;
  return keep_owned(g, item, references, flags);
}

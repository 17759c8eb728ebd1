// What the kernels of cuda_cases.py do, by their names.
#pragma once
#define SHARED_MAX 232448

typedef struct {
  const char* name;
  size_t params;
  int (*run)(const void*, const Shape*);
} Kernel;
struct Func {
  const Kernel* kernel;
  unsigned shared_max;
  char name[64];
  void* module;
};
typedef struct {
  const float *x, *y;
  float* out;
  int64_t n;
} Vectors;
static int k_add(const void* p, const Shape* s) {
  const Vectors* v = p;
  (void)s;
  if (!in(v->x, v->n * 4) || !in(v->y, v->n * 4) || !in(v->out, v->n * 4)) return 1;
  for (int64_t i = 0; i < v->n; i++) v->out[i] = v->x[i] + v->y[i];
  return 0;
}
static int k_count(const void* p, const Shape* s) {
  int64_t* out = *(int64_t**)p;
  (void)s;
  if (!in(out, 24)) return 1;
  out[0]++, out[1] = out[2] = 1;
  return 0;
}
typedef struct {
  int64_t* out;
} Out;
static int k_cluster(const void* p, const Shape* s) {
  int64_t* out = ((const Out*)p)->out;
  if (!in(out, s->grid[0] * 8)) return 1;
  for (unsigned i = 0; i < s->grid[0]; i++) out[i] = s->cluster;
  return 0;
}
static int k_shared(const void* p, const Shape* s) {
  int64_t* out = ((const Out*)p)->out;
  if (!in(out, 8)) return 1;
  *out = s->shared / 4;
  return 0;
}
typedef struct {
  const float* x;
  int64_t n;
} Row;
typedef struct {
  const Row* rows;
  int64_t count;
  float* out;
} Rows;
static int k_table(const void* p, const Shape* s) {
  const Rows* r = p;
  (void)s;
  if (!in(r->rows, r->count * sizeof(Row)) || !in(r->out, r->count * 4)) return 1;
  for (int64_t i = 0; i < r->count; i++) {
    float sum = 0;
    if (!in(r->rows[i].x, r->rows[i].n * 4)) return 1;
    for (int64_t j = 0; j < r->rows[i].n; j++) sum += r->rows[i].x[j];
    r->out[i] = sum;
  }
  return 0;
}
typedef struct {
  int32_t* counter;
  int64_t* out;
} Counted;
static int k_last(const void* p, const Shape* s) {
  const Counted* c = p;
  if (!in(c->counter, 4) || !in(c->out, 8) || *c->counter) return 1;
  *c->out += s->grid[0];
  return 0;
}
static int k_gate(const void* p, const Shape* s) {
  const Out* o = p;
  (void)s;
  return !in(o->out, 8);
}
static int k_fault(const void* p, const Shape* s) {
  (void)p, (void)s;
  return 1;
}
typedef struct __attribute__((packed)) {
  uint64_t magic, address, rank, sizes[5];
  char rest[64];
} Map;
typedef struct {
  Map map;
  float* out;
} Mapped;
static int k_tile(const void* p, const Shape* s) {
  const Mapped* m = p;
  (void)s;
  if (m->map.magic != 0x7473 || !in((void*)m->map.address, 64 * 4) || !in(m->out, 64 * 4)) return 1;
  for (int row = 0; row < 8; row++) memcpy(m->out + row * 8, (float*)m->map.address + row * m->map.sizes[0], 32);
  return 0;
}
static const Kernel kernels[] = {
    {"add", 32, k_add},     {"count", 8, k_count},  {"cluster", 8, k_cluster}, {"shared_bytes", 8, k_shared},
    {"table", 24, k_table}, {"last", 16, k_last},   {"gate", 8, k_gate},       {"fault", 8, k_fault},
    {"tile", 192, k_tile},  {"then_add", 32, k_add}};

static int launch_ready(Op* op) { return strcmp(op->func->name, "gate") || is_open(*(Ptr*)op->params); }
static R launch_perform(Op* op) {
  return op->func->kernel->run(op->params, &op->shape) ? ILLEGAL_ADDRESS : OK;
}

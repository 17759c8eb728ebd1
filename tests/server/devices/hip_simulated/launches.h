// Launches, alone and of graphs.
#pragma once
static int launch_ready(Op* op) {
  Job* job = op->job;
  if (!job) {
    if (!strcmp(op->func->name, "gate") && !is_open(*(Ptr*)op->params)) return 0;
    job = op->job = calloc(1, sizeof *job);
    job->result = launch_fault();
    job->done = job->result != OK;
    if (job->done) faulted(job->result, "a fault that was asked for");
    else {
      free(job);
      Module* m = op->func->module;
      if (!m->sent++) submit_module(m->id, m->image, m->size);
      job = op->job = submit_run(m->id, op->func->name, &op->shape, op->params, op->n);
    }
  }
  return job->done;
}
static R launch_perform(Op* op) {
  Job* job = op->job;
  const R r = job->result;
  free(job);
  return r;
}

// The block of arguments in ``extra``: BUFFER_POINTER (1) and BUFFER_SIZE (2), in any order, to END (3).
static const void* block_of(void** extra, size_t* n) {
  const void* block = 0;
  *n = 0;
  for (; extra && *extra != (void*)3; extra += 2) {
    if (*extra == (void*)1) block = extra[1];
    else if (*extra == (void*)2) *n = *(size_t*)extra[1];
    else return 0;
  }
  return block;
}
static R admit(const Func* f, const Shape* s, size_t argument_bytes) {
  if (!f) return INVALID_HANDLE;
  const uint64_t threads = (uint64_t)s->block[0] * s->block[1] * s->block[2];
  for (int i = 0; i < 3; i++)
    if (!s->grid[i] || !s->block[i] || (uint64_t)s->grid[i] * s->block[i] >> 32) return INVALID_CONFIGURATION;
  if (threads > f->threads) return INVALID_CONFIGURATION;
  if (f->lds + s->shared > chip(f->module->device)->lds || argument_bytes >= f->arguments + 64) return INVALID_VALUE;
  if (f->module->device != current - 1) return INVALID_HANDLE;
  return emulator() ? OK : NOT_SUPPORTED;
}
R hipModuleLaunchKernel(Func* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, Stream* s, void** params, void** extra) {
  ENTER;
  const Shape shape = {.grid = {gx, gy, gz}, .block = {bx, by, bz}, .shared = shared};
  size_t n;
  const void* block = block_of(extra, &n);
  if (params || (extra && !block)) return INVALID_VALUE;  // arguments one by one are not simulated
  const R r = admit(f, &shape, n);
  if (r) return r;
  if (n > f->arguments) n = f->arguments;  // what the kernel does not take
  void* copied = memcpy(calloc(1, n + 8), block ? block : "", n);
  return put_on(s, (Op){.kind = LAUNCH, .func = f, .shape = shape, .params = copied, .n = n});
}

typedef struct {
  unsigned block[3];
  void** extra;
  Func* func;
  unsigned grid[3];
  void** params;
  unsigned shared;
} NodeParams;
R hipGraphInstantiateWithFlags(Exec** e, Graph* g, unsigned long long f) {
  ENTER;
  if (f || !g->count) return INVALID_VALUE;
  *e = calloc(1, sizeof **e);
  (*e)->count = g->count;
  for (int i = 0; i < g->count; i++) {
    Op* node = g->nodes[i];
    (*e)->origin[i] = node, (*e)->copy[i] = *node;
    (*e)->copy[i].params = memcpy(calloc(1, node->n + 8), node->params, node->n);
  }
  return OK;
}
R hipGraphInstantiate(Exec** e, Graph* g, void* node, char* log, size_t n) {
  return (void)node, (void)log, (void)n, hipGraphInstantiateWithFlags(e, g, 0);
}
R hipGraphExecKernelNodeSetParams(Exec* e, Op* node, const NodeParams* p) {
  ENTER;
  for (int i = 0; i < e->count; i++)
    if (e->origin[i] == node) {
      size_t n;
      const void* block = block_of(p->extra, &n);
      Op* copy = &e->copy[i];
      if (n > p->func->arguments) n = p->func->arguments;
      if (p->params || !block || p->func != node->func || n != node->n) return INVALID_VALUE;
      memcpy(copy->shape.grid, p->grid, 12), memcpy(copy->shape.block, p->block, 12), copy->shape.shared = p->shared;
      memcpy(copy->params, block, n);
      return admit(p->func, &copy->shape, n);
    }
  return INVALID_VALUE;
}
R hipGraphLaunch(Exec* e, Stream* s) {
  ENTER;
  for (int i = 0; i < e->count; i++) {
    Op op = e->copy[i];
    op.params = memcpy(calloc(1, op.n + 8), e->copy[i].params, op.n);
    const R r = put_on(s, op);
    if (r) return r;
  }
  return OK;
}
R hipGraphExecDestroy(Exec* e) {
  ENTER;
  for (int i = 0; i < e->count; i++) free(e->copy[i].params);
  return free(e), OK;
}
R hipGraphDestroy(Graph* g) {
  ENTER;
  return free(g), OK;
}

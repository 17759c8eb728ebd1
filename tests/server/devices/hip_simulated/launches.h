// Launches, alone and of graphs.
#pragma once
static void* call_host(void* argument) {
  Op* op = argument;
  ((void (*)(void*))op->a)((void*)op->b);
  pthread_mutex_lock(&lock);
  ((Job*)op->job)->done = 1;
  pump();
  pthread_mutex_unlock(&lock);
  return 0;
}
static int launch_ready(Op* op) {
  Job* job = op->job;
  if (!job && !op->func) {
    pthread_t thread;
    job = op->job = calloc(1, sizeof *job);
    if (pthread_create(&thread, 0, call_host, op)) job->done = 1;
    else pthread_detach(thread);
  } else if (!job) {
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

R hipLaunchHostFunc(Stream* s, Ptr function, Ptr data) {
  ENTER;
  if (!function) return INVALID_VALUE;
  if (stream_of(s)->capture) return CAPTURE_UNSUPPORTED;
  return put_on(s, (Op){.kind = LAUNCH, .a = function, .b = data});
}

// Graphs. Arguments are copied when a launch is captured, and again when a graph is made to be launched; what is under
// way goes on without the graph. That arguments can be replaced is not simulated: no device does it.
static unsigned graphs, executables;
// For tests: how many there are.
R simGraphs(unsigned* all, unsigned* executable) {
  ENTER;
  return *all = graphs, *executable = executables, OK;
}
R hipStreamBeginCapture(Stream* s, int mode) {
  ENTER;
  if (mode < 0 || mode > 2 || (Ptr)s <= 2 || s->head || s->capture) return INVALID_VALUE;
  s->capture = calloc(1, sizeof(Graph)), s->capture_id = ++capture_serial;
  return OK;
}
R hipStreamGetCaptureInfo_v2(Stream* handle, int* status, unsigned long long* id, Graph** g, Op*** deps, size_t* n) {
  ENTER;
  (void)deps, (void)n;
  Stream* s = stream_of(handle);
  *status = s->capture ? 1 : 0;
  if (id) *id = *status ? s->capture_id : 0;
  if (g) *g = s->capture;
  return OK;
}
R hipThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < 0 || *mode > 2) return INVALID_VALUE;
  const int before = capture_mode;
  capture_mode = *mode, *mode = before;
  return OK;
}
R hipUserObjectCreate(Owned** out, void* object, void (*destroy)(void*), unsigned references, unsigned flags) {
  ENTER;
  return own_object(out, object, destroy, references, flags);
}
R hipGraphRetainUserObject(Graph* g, Owned* item, unsigned references, unsigned flags) {
  ENTER;
  return keep_owned(g, item, references, flags);
}
R hipStreamEndCapture(Stream* s, Graph** g) {
  ENTER;
  if ((Ptr)s <= 2 || !s->capture) return INVALID_VALUE;
  *g = s->capture, s->capture = 0, graphs++;
  return OK;
}
R hipGraphInstantiateWithFlags(Exec** e, Graph* g, unsigned long long f) {
  ENTER;
  if (f || !g->count) return INVALID_VALUE;
  if (graph_fault()) return OOM;
  *e = calloc(1, sizeof **e);
  (*e)->count = g->count, executables++;
  share_owned(&(*e)->owned, &g->owned);
  for (int i = 0; i < g->count; i++) {
    (*e)->copy[i] = *g->nodes[i];
    (*e)->copy[i].params = memcpy(calloc(1, g->nodes[i]->n + 8), g->nodes[i]->params, g->nodes[i]->n);
  }
  return OK;
}
R hipGraphInstantiate(Exec** e, Graph* g, void* node, char* log, size_t n) {
  return (void)node, (void)log, (void)n, hipGraphInstantiateWithFlags(e, g, 0);
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
  drop_owned(&e->owned);
  for (int i = 0; i < e->count; i++) free(e->copy[i].params);
  return free(e), executables--, OK;
}
R hipGraphDestroy(Graph* g) {
  ENTER;
  drop_owned(&g->owned);
  for (int i = 0; i < g->count; i++) free(g->nodes[i]->params), free(g->nodes[i]);
  return free(g), graphs--, OK;
}

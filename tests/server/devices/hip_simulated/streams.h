// Streams, and the default ones with what they wait for.
#pragma once
static Stream* null_stream;
static __thread Stream* own_stream;

static void* keep_running(void* unused) {
  for (;;) {
    usleep(500);
    pthread_mutex_lock(&lock);
    pump();
    pthread_mutex_unlock(&lock);
  }
  return unused;
}
static Stream* new_stream(int blocking) {
  static int running;
  pthread_t thread;
  if (!running++ && !pthread_create(&thread, 0, keep_running, 0)) pthread_detach(thread);  // the device works by itself
  Stream* s = calloc(1, sizeof *s);
  s->blocking = blocking, s->device = current - 1;
  s->next = streams, streams = s;
  return s;
}
// The stream that a handle means: 0 and 1 are the default one of all threads, 2 that of the thread.
static Stream* stream_of(Stream* s) {
  if ((Ptr)s > 2) return s;
  Stream** at = (Ptr)s == 2 ? &own_stream : &null_stream;
  if (!*at) *at = new_stream((Ptr)s == 2);
  return *at;
}
static R capturing(void) {
  for (Stream* s = streams; s; s = s->next)
    if (s->blocking && s->capture) return CAPTURE_IMPLICIT;
  return OK;
}
// Let what comes next on ``later`` wait for what is on ``earlier`` now.
static void behind(Stream* later, Stream* earlier) {
  pump();
  if (!earlier || earlier == later || !earlier->head) return;
  Event* e = calloc(1, sizeof *e);
  e->state = calloc(1, sizeof *e->state);
  e->state->recorded = 1;
  put(earlier, (Op){.kind = RECORD, .event = e, .target = 1});
  put(later, (Op){.kind = WAIT, .event = e, .target = 1});
}
// Put an operation on a stream: the default stream and blocking ones wait for each other.
static R put_on(Stream* handle, Op op) {
  Stream* s = stream_of(handle);
  if (s == null_stream) {
    if (capturing()) return free(op.params), capturing();
    for (Stream* b = streams; b; b = b->next)
      if (b->blocking) behind(s, b);
  } else if (s->blocking && !s->capture) behind(s, null_stream);
  const R r = put(s, op);
  if (r) free(op.params);
  return r;
}
static R finish(Stream* s) {
  for (pump(); s->head && !sticky; pump()) nap();
  return sticky;
}
// A wait of the host for everything: before memory that work may use goes.
static R finish_all(void) {
  for (int busy = 1; busy; busy ? nap() : (void)0) {
    pump();
    busy = 0;
    for (Stream* s = streams; s && !sticky; s = s->next) busy |= !!s->head;
  }
  return sticky;
}

R hipStreamCreateWithFlags(Stream** s, unsigned f) {
  ENTER;
  return f > 1 ? INVALID_VALUE : (*s = new_stream(!f), OK);
}
R hipStreamCreateWithPriority(Stream** s, unsigned f, int priority) {
  (void)priority;
  return hipStreamCreateWithFlags(s, f);
}
R hipStreamCreate(Stream** s) { return hipStreamCreateWithFlags(s, 0); }
R hipStreamDestroy(Stream* s) {
  ENTER;
  pump();
  if ((Ptr)s <= 2) return INVALID_HANDLE;
  if (s->head) {
    fprintf(stderr, "sim: a busy stream was destroyed\n");
    abort();
  }
  for (Stream** at = &streams; *at; at = &(*at)->next)
    if (*at == s) {
      *at = s->next;
      free(s);
      return OK;
    }
  return INVALID_HANDLE;
}
R hipStreamQuery(Stream* handle) {
  ENTER;
  Stream* s = stream_of(handle);
  if (s->capture) return CAPTURE_UNSUPPORTED;
  if (s == null_stream && capturing()) return capturing();
  pump();
  return sticky ? sticky : s->head ? NOT_READY : OK;
}
R hipStreamIsCapturing(Stream* handle, int* status) {
  ENTER;
  Stream* s = stream_of(handle);
  *status = s->capture ? 1 : 0;
  return s == null_stream ? capturing() : OK;
}
R hipStreamSynchronize(Stream* handle) {
  ENTER;
  Stream* s = stream_of(handle);
  if (s->capture) return CAPTURE_UNSUPPORTED;
  if (s == null_stream)
    for (Stream* b = streams; b; b = b->next)
      if (b->blocking && !b->capture) finish(b);
  return finish(s);
}
R hipDeviceSynchronize(void) {
  ENTER;
  return finish_all();
}
R hipStreamGetDevice(Stream* handle, int* d) {
  ENTER;
  return *d = stream_of(handle)->device, OK;
}

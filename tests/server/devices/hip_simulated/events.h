// Events, of this process and of others.
#pragma once
R hipEventCreateWithFlags(Event** e, unsigned f) {
  ENTER;
  if (f & 4 && !(f & 2)) return INVALID_VALUE;
  *e = calloc(1, sizeof **e);
  (*e)->shared = !!(f & 4), (*e)->untimed = !!(f & 2);
  size_t size = sizeof(State);
  if (f & 4) {
    named((*e)->name, "e", getpid(), ++serial);
    (*e)->state = shared((*e)->name, &size, 1);
  } else (*e)->state = calloc(1, size);
  return (*e)->state ? OK : OOM;
}
R hipEventCreate(Event** e) { return hipEventCreateWithFlags(e, 0); }
R hipEventDestroy(Event* e) {
  ENTER;
  if (!e) return INVALID_HANDLE;
  if (quirk("drains") && finish_all()) return sticky;
  if (e->shared && !e->foreign) shm_unlink(e->name);
  return OK;
}  // may be in use still
R hipEventRecord(Event* e, Stream* s) {
  ENTER;
  if (!e) return INVALID_HANDLE;
  return put_on(s, (Op){.kind = RECORD, .event = e, .target = ++e->state->recorded});
}
R hipStreamWaitEvent(Stream* s, Event* e, unsigned f) {
  ENTER;
  if (!e) return INVALID_HANDLE;
  if (f) return INVALID_VALUE;
  if (e->foreign && quirk("record33") && e->state->recorded > 32) return INVALID_VALUE;
  if (e->foreign && quirk("wait_blocks"))
    for (pump(); !sticky && e->state->completed < e->state->recorded; pump()) nap();
  return put_on(s, (Op){.kind = WAIT, .event = e, .target = e->state->recorded});
}
R hipEventQuery(Event* e) {
  ENTER;
  if (!e) return INVALID_HANDLE;
  pump();
  if (e->shared && quirk("query_done")) return sticky;
  return sticky ? sticky : e->state->completed < e->state->recorded ? NOT_READY : OK;
}
R hipEventSynchronize(Event* e) {
  ENTER;
  if (!e) return INVALID_HANDLE;
  for (pump(); !sticky && e->state->completed < e->state->recorded; pump()) nap();
  return sticky;
}
R hipEventElapsedTime(float* ms, Event* a, Event* b) {
  ENTER;
  if (!a || !b || a->untimed || b->untimed || !a->state->recorded || !b->state->recorded) return INVALID_HANDLE;
  if (a->state->completed < a->state->recorded || b->state->completed < b->state->recorded) return NOT_READY;
  *ms = b->state->time - a->state->time + 0.001f;
  return OK;
}
typedef struct {
  char bytes[64];
} Handle;
static const char* seen_shm(void) {
  const char* name = getenv("TW_SIM_SHM");
  return name ? name : "";
}
R hipIpcGetEventHandle(Handle* h, Event* e) {
  ENTER;
  if (!e || !e->shared || e->foreign) return INVALID_HANDLE;
  memset(h, 0xEE, 64);
  memcpy(h, e->name, 40);
  snprintf(h->bytes + 40, 24, "%s", seen_shm());
  return OK;
}
R hipIpcOpenEventHandle(Event** e, Handle h) {
  ENTER;
  size_t size;
  h.bytes[39] = 0;
  State* s = strcmp(h.bytes + 40, seen_shm()) ? 0 : shared(h.bytes, &size, 0);
  if (!s && quirk("open_creates")) s = calloc(1, sizeof *s);
  if (!s) return INVALID_VALUE;
  *e = calloc(1, sizeof **e);
  (*e)->state = s, (*e)->shared = (*e)->foreign = 1;
  return OK;
}

// For tests of clients: holds a stream until it is let go.
R simHold(Stream* s, Event** e) {
  ENTER;
  *e = calloc(1, sizeof **e);
  (*e)->state = calloc(1, sizeof *(*e)->state);
  return put_on(s, (Op){.kind = WAIT, .event = *e, .target = (*e)->state->recorded = 1});
}
R simRelease(Event* e) {
  ENTER;
  e->state->completed = 1;
  pump();
  return OK;
}
